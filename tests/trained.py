"""A small run, trained once for every test that looks at a finished one."""

import copy
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny
from tests.flags import quick
from windlass.errors import UserError
from windlass.sources import stories as stories_source
from windlass.starting.describe import describe

CORPUS, DOCUMENTS = "stories.jsonl", 40
RECIPE = {
    "model": {"family": "qwen3", "vocab": 300, **tiny.WIDTHS},
    "tokenizer": {"kind": "bpe", "vocab": 300},
    "data": {"source": {"kind": "jsonl", "path": CORPUS}, "length": 90, "validation": 0.05},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 4, "batch": 8},
    "checkpoint": {"every": 2},
    "device": {"kind": "cpu", "count": 1},
    "by_device": {
        "cpu": {"train": {"batch": 16}, "optim": {"learning_rate": 3.6e-3}},
        "tpu": {"train": {"batch": 64}},
    },
}
# Keys that make quickstart a matter of seconds; those who share them share what is compiled.
SMALL = ["train.steps=3", "train.batch=4", "data.source.count=200", "data.validation=0.05"]
ROWS = 10  # that the recipe holds out for validation
OUTPUT = "output.txt"


def recipe(**sections: dict) -> dict:
    """The recipe of the run with some keys of some sections changed."""
    changed = copy.deepcopy(RECIPE)
    for name, keys in sections.items():
        changed[name] = {**changed.get(name, {}), **keys}
    return changed


def on_weights(**model: Any) -> dict:
    """The recipe on weights that are there, which bring their tokenizer."""
    changed = recipe() | {"model": model}
    del changed["tokenizer"]
    return changed


def refusal(recipe: dict, keys: Sequence[str]) -> str:
    """The words with which a recipe is refused before anything is computed."""
    with pytest.raises(UserError) as refused:
        describe(recipe, keys)
    return str(refused.value)


def workplace(factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.yaml`, its one run under `runs`, and what the program printed.

    Whichever process of the tests asks first trains it; nobody may change it.
    """
    base = factory.getbasetemp()  # of this process, where several share the tests
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / OUTPUT).exists():
            train(folder)
    return folder


def train(folder: Path) -> Path:
    """Train the recipe in a folder, and return the folder of the run."""
    write_corpus(folder / CORPUS, DOCUMENTS)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    printed = windlass(folder, "train", "tiny.yaml")
    (folder / OUTPUT).write_text(printed.stdout)
    return only_run(folder)


def write_corpus(path: Path, documents: int) -> None:
    stories = stories_source.Source(count=documents)
    path.write_text("".join(json.dumps(stories[i]) + "\n" for i in range(documents)))


def only_run(folder: Path) -> Path:
    (found,) = (folder / "runs").glob("*-*")
    return found


def windlass(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess:
    """The program as a process of its own, in a folder, on the one device of a plain machine."""
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def environment() -> dict[str, str]:
    source = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": source, "XLA_FLAGS": quick(), "COLUMNS": "80"}
