"""What the README says is so: its commands are run as they stand."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import windlass
from tests import trained
from windlass.checkpoint import Checkpoint
from windlass.config import load
from windlass.starting.describe import describe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
NOT_RUN = ("make test", "make check")  # this test is part of the one, and the other of no test

# A stand-in for the environment that make would install: the same program, on less data.
PROGRAM = f"""\
#!/bin/sh
case "$1 $2" in
  "train quickstart" | "data quickstart")
    set -- "$@" {" ".join(trained.SMALL)}
esac
exec {sys.executable} -m windlass "$@"
"""

# The same for many commands, in one process: most of the time of a command is its start.
ONE_BY_ONE = """\
import shlex, sys
from windlass.cli.commands import run
from windlass.processes.signals import Signals
for line in sys.stdin:
    program, *words = shlex.split(line.partition(">")[0])
    assert program == ".venv/bin/windlass", line
    code = run(words + sys.argv[1:] * (words == ["data", "quickstart"]), Signals())
    if code:
        sys.exit(f"{line}ended with {code}")
"""


def blocks(kind: str) -> list[str]:
    return [text for language, text in BLOCKS if language == kind]


def commands() -> list[str]:
    lines = [
        line.partition("  #")[0].strip() for text in blocks("sh") for line in text.splitlines()
    ]
    return [line for line in lines if line not in NOT_RUN]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A folder like a clone in which make has already installed what it installs."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, folder)
    program = folder / ".venv/bin/windlass"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (folder / ".venv/.core").touch()
    return folder


def shell(command: str, folder: Path, typed: str = "") -> subprocess.CompletedProcess:
    environment = trained.environment()
    environment["PATH"] = f"{folder}/.venv/bin:{environment['PATH']}"
    # The tests themselves may have been started by make, with an environment of its own.
    for name in ("MAKEFLAGS", "MAKELEVEL", "VENV"):
        environment.pop(name, None)
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_every_command_runs_one_after_the_other(clone):
    first, *others = commands()
    assert first == "make quickstart"
    together = shlex.join([sys.executable, "-c", ONE_BY_ONE, *trained.SMALL])
    for command, typed in ((first, ""), (together, "".join(f"{line}\n" for line in others))):
        done = shell(command, clone, typed)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_every_answer_is_what_the_program_says(clone):
    shown = [text for text in blocks("") if text.startswith("$ ")]
    assert shown
    for text in shown:
        command, answer = text.removeprefix("$ ").split("\n", 1)
        done = shell(command, clone)
        assert done.stdout + done.stderr == answer


def test_the_recipe_can_be_read_and_its_data_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks("yaml")
    Path("mine.yaml").write_text(recipe)
    trained.write_corpus(Path("my.jsonl"), 300)
    assert describe("mine.yaml", ["device=cpu"]).run.train.batch == 64
    assert load("mine.yaml").merged("tpu")["train"]["batch"] == 128
    assert set(windlass.data("mine.yaml").splits) == {"train", "validation"}


def test_every_call_is_there():
    calls = re.findall(r"`windlass\.(\w+)\(", README)
    assert calls
    assert set(calls) <= set(windlass.__all__)


def test_the_tree_lists_every_folder_and_file_of_the_package():
    (tree,) = [text for text in blocks("") if text.startswith("windlass/")]
    inner = re.findall(r"^[ +] ([\w.]+/?) ", tree, re.MULTILINE)
    outer = re.findall(r"^(\w+)/", tree, re.MULTILINE)
    assert sorted(inner) == sorted([*_folders(ROOT / "windlass", "/"), *_modules()])
    assert sorted(outer) == sorted(_folders(ROOT))


def _folders(place: Path, mark: str = "") -> list[str]:
    ignored = (ROOT / ".gitignore").read_text().split()
    return [
        path.name + mark
        for path in place.iterdir()
        if path.is_dir() and path.name[0] != "." and not any(_matches(path, x) for x in ignored)
    ]


def _matches(path: Path, pattern: str) -> bool:
    return path.match(pattern.rstrip("/"))


def _modules() -> list[str]:
    return [path.name for path in (ROOT / "windlass").glob("*.py") if path.name[0] != "_"]


def test_it_says_what_a_kill_loses_at_most():
    (minutes,) = Checkpoint().every.also
    assert (Checkpoint().every.unit, minutes.unit) == ("steps", "min")
    assert f"at most {Checkpoint().every.number} steps or {minutes.number} minutes" in README


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_the_files_it_names_exist():
    named = re.findall(r"\]\(([\w.]+)\)|`(docs/[\w.]+)`", README)
    assert named
    assert all(os.path.exists(ROOT / "".join(pair)) for pair in named)
