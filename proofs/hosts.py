"""A run is the same in any number of processes, and goes on in any other.

Processes are real ones on this machine, each with simulated devices of its own, that speak to each
other over its loopback interface. "2 × 4" are two processes of four devices.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import tests.conftest  # noqa: F401  the settings under which the numbers are compared
from tests import published
from tests.flags import with_devices
from tests.spawn import REPOSITORY, processes
from tests.training import test_reference as pairs
from tests.training.campaign import RECIPE, weights
from windlass import api
from windlass.checkpoint.store import folder_of, steps_in
from windlass.telemetry.metrics import read

STEPS = 8  # of a whole run; the others stop at half of them and go on elsewhere
KEYS = ["train.batch=16", "train.evaluate_every=4", "checkpoint.every=2", "checkpoint.keep=9"]
KEYS += ["optim.schedule.shape=constant"]
CLOSE = 1e-5  # relative, of losses in float32
LONGEST = 600.0  # seconds, for a run

Where = tuple[int, int]  # processes, and devices of each


def prove() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        found = {
            "together": together(here / "together"),
            "resumed": resumed(here / "resumed"),
            "mesh": alike(here / "mesh", RECIPE, ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]),
            "one_file": one_file(here / "file"),
            "lora_from_a_folder": lora(here / "lora"),
            "preference": preference(here / "pairs"),
            "every_second": timed(here / "timed"),
            "killed_in_a_save": killed(here / "killed"),
        }
    return {"holds": all(part["holds"] for part in found.values()), "steps": STEPS, **found}


def together(here: Path) -> dict[str, Any]:
    """Losses, evaluations, tokens and samples of one, two and four processes, and commands."""
    runs = {
        name(where): train(
            here / name(where), RECIPE, where, f"train.steps={STEPS}", "train.sample=Once"
        )
        for where in ((1, 8), (2, 4), (4, 2))
    }
    found = compared(runs, "1 × 8")
    for named, run in runs.items():
        api.export(run, here / f"{named} exported")
    return found | {"generated": [api.generate(run, "Once", tokens=8) for run in runs.values()]}


def resumed(here: Path) -> dict[str, Any]:
    """What two processes saved together, gone on with by others."""
    half = train(here / "half", RECIPE, (2, 4), f"train.steps={STEPS // 2}")
    runs = {"whole": train(here / "whole", RECIPE, (1, 8), f"train.steps={STEPS}")}
    for where in ((2, 4), (1, 8), (1, 4), (4, 2)):
        run = runs[name(where)] = here / name(where) / "run"
        shutil.copytree(half, run)
        if where == (2, 4):
            flip(next((folder_of(run) / f"{STEPS // 2}/state").rglob("d/*")))
        train(here / name(where), RECIPE, where, f"train.steps={STEPS}")
    found = compared(runs, "whole")
    aside = [path.name for path in folder_of(runs["2 × 4"]).glob("*.damaged*")]
    found["damaged_and_put_aside"] = aside
    found["holds"] &= aside == [f"{STEPS // 2}.damaged"]
    return found


def alike(here: Path, recipe: dict, keys: list[str], where: Where = (2, 4)) -> dict[str, Any]:
    """The same recipe in one process, and in several."""
    runs = {
        name(each): train(here / name(each), recipe, each, f"train.steps={STEPS}", *keys)
        for each in ((1, where[0] * where[1]), where)
    }
    return compared(runs, name((1, where[0] * where[1])))


def one_file(here: Path) -> dict[str, Any]:
    """Four processes read one file, each its own rows."""
    here.mkdir(parents=True)
    rows = [{"text": f"{number} and {number + 1} are {2 * number + 1}. "} for number in range(900)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(here / "rows.jsonl"), "column": "text"}
    data = RECIPE["data"] | {"source": source}
    return alike(here, RECIPE | {"data": data}, [], (4, 2))


def lora(here: Path) -> dict[str, Any]:
    """An adapter beside the frozen weights of a folder, each device reading its own part."""
    model = published.write(here / "model")
    recipe = RECIPE | {"model": {"path": str(model)}, "adapter": {"kind": "lora", "rank": 4}}
    return alike(here, recipe, ["mesh.fsdp=4", "mesh.data=2"])


def preference(here: Path) -> dict[str, Any]:
    """Preferences, whose first log-probabilities every process asks for and one writes."""
    here.mkdir(parents=True)
    pairs.write(here)
    source = {"kind": "jsonl", "path": str(here / "pairs.jsonl")}
    data = pairs.RECIPE["data"] | {"source": source}
    return alike(here, pairs.RECIPE | {"data": data, "device": "cpu"}, [])


def timed(here: Path) -> dict[str, Any]:
    """Saves by the clock of one process fall on the same steps of all: they are saved together."""
    keys = ["train.steps=60", "checkpoint.every=1s", "telemetry.every=9"]
    run = train(here, RECIPE, (2, 4), *keys, "train.evaluate_every=null")
    saved = steps_in(folder_of(run))
    holds = len(saved) > 2 and all(step % 10 == 0 for step in saved) and api.verify(run).good
    return {"holds": holds, "saved": saved}


def killed(here: Path) -> dict[str, Any]:
    """One of two processes killed with -9 inside a save, and both started again."""
    keys = ["train.steps=24", "checkpoint.every=1", "train.evaluate_every=null"]
    whole = train(here / "whole", RECIPE, (2, 4), *keys)
    run, words = here / "cut" / "run", written(here / "cut", RECIPE, *keys)
    with processes(here / "cut", words, environ=environment(4)) as running:
        saving = folder_of(run)
        while not any(saving.glob("[1-9]*.orbax-checkpoint-tmp")):
            assert running.started[1].poll() is None, running.output(0) + running.output(1)
            time.sleep(0.001)
        os.kill(running.trainer(1), signal.SIGKILL)
        survivor = running.wait(0, 60.0)  # as is promised
    left = sorted(path.name for path in saving.glob("*.orbax-checkpoint-tmp"))
    train(here / "cut", RECIPE, (2, 4), *keys)
    after = sorted(path.name for path in saving.glob("*") if not path.name.isdigit())
    same = weights(run) == weights(whole)
    return {
        "holds": same and not after and survivor.code == 1,
        "left_by_the_kill": left,
        "left_after_the_next_start": after,
        "same_bits": same,
        "survivor": survivor.output.splitlines()[-1],
    }


def train(here: Path, recipe: dict, where: Where, *keys: str) -> Path:
    """A run in a folder, in so many processes with so many devices each."""
    words, environ = written(here, recipe, *keys), environment(where[1])
    if where[0] == 1:
        command = [sys.executable, "-m", "windlass", "train", *words]
        done = subprocess.run(
            command, cwd=here, env=os.environ | environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return here / "run"
    with processes(here, words, *where, environ=environ) as running:
        for ended in running.finish(LONGEST):
            assert ended.code == 0, ended.output
    return here / "run"


def written(here: Path, recipe: dict, *keys: str) -> list[str]:
    """What follows `train`, once the recipe is written."""
    here.mkdir(parents=True, exist_ok=True)
    (here / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    return ["tiny.yaml", *KEYS, f"run.dir={here / 'run'}", *keys]


def environment(devices: int) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "XLA_FLAGS": with_devices(devices)}


def compared(runs: dict[str, Path], reference: str) -> dict[str, Any]:
    """How far the numbers of runs are from those of one of them, and whether the tokens are."""
    expected = numbers(runs[reference])
    apart, streams = {}, {}
    for named, run in runs.items():
        found = numbers(run)
        streams[named] = found["token_hash"][-1]
        if named != reference:
            apart[named] = {
                key: gap(found[key], expected[key]) for key in expected if key != "token_hash"
            }
            apart[named]["same_token_hash"] = found["token_hash"] == expected["token_hash"]
    holds = all(
        part["same_token_hash"] and max(x for x in part.values() if not isinstance(x, bool)) < CLOSE
        for part in apart.values()
    )
    verified = {named: api.verify(run).good for named, run in runs.items()}
    result = {"holds": holds and all(verified.values()), "token_hash": streams, "apart": apart}
    result["losses"] = expected["loss"]
    samples = {named: run / "samples.txt" for named, run in runs.items()}
    if samples[reference].exists():
        texts = {named: file.read_text() for named, file in samples.items()}
        result["same_samples"] = len(set(texts.values())) == 1
        result["holds"] &= all(text.count("--- step") == STEPS // 4 for text in texts.values())
    return result


def flip(path: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def numbers(run: Path) -> dict[str, list]:
    """What a run recorded, by name, in the order of its steps."""
    records = read(run / "metrics.jsonl")
    names = ("loss", "gradient_norm", "validation_loss", "token_hash")
    return {key: [record[key] for record in records if key in record] for key in names}


def gap(found: list, expected: list) -> float:
    return float(np.abs(np.divide(found, expected) - 1).max())


def name(where: Where) -> str:
    return f"{where[0]} × {where[1]}"
