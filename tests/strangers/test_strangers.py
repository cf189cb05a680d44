"""What every stranger gets by being there: a mesh, resuming after kill -9, a plan, an export."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from jax.extend.core import Jaxpr

from tests import strangers, tiny
from tests.flags import quick
from tests.training.campaign import weights
from windlass import api
from windlass.checkpoint.store import newest_step
from windlass.planning import memory, targets, traced
from windlass.planning.plan import Plan
from windlass.processes.signals import Signals
from windlass.run_folder.folder import PLAN
from windlass.starting.describe import describe
from windlass.training.train import train

ALONE = ["device.kind=cpu", "device.count=1"]
SPLIT = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
MESH = ["device.kind=cpu", "device.count=8", *SPLIT]
CLOSE = 1e-5  # relative, of losses in float32
TEACHER = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "data": {"source": {"kind": "stories", "count": 40}, "length": 48},
    "optim": {"kind": "adamw", "learning_rate": 3e-3},
    "train": {"steps": 1, "batch": 8},
}
RECIPES = sorted(path.stem for path in (strangers.HERE / "recipes").glob("*.yaml"))
# One with a family and a carry of its own; of the others each contract has its quicker tests.
QUICK = "gru_slots"
TIERED = [n if n == QUICK else pytest.param(n, marks=pytest.mark.long) for n in RECIPES]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The folder of an exported model, for recipes that name one."""
    here = tmp_path_factory.mktemp("teacher")
    train(TEACHER, [f"run.dir={here / 'run'}", *ALONE], signals=Signals())
    return api.export(here / "run", here / "model").folder


@pytest.fixture(scope="module", params=TIERED)
def recipe(request) -> dict:
    """Each recipe in turn, with a record and a checkpoint of every step."""
    text = (strangers.HERE / "recipes" / f"{request.param}.yaml").read_text()
    names = {"TEACHER": request.getfixturevalue("teacher")} if "TEACHER" in text else {}
    found = yaml.safe_load(Template(text).substitute(names))
    return {"checkpoint": {"every": 1}, "telemetry": {"every": 1}, **found}


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    """The run of a recipe on one device, never disturbed."""
    run = tmp_path_factory.mktemp("stranger") / "whole"
    train(recipe, [f"run.dir={run}", *ALONE], signals=Signals(), plans=True)
    return run


@pytest.fixture(scope="module")
def split(recipe, tmp_path_factory) -> Path:
    """The same on a mesh of all three axes, in microbatches."""
    run = tmp_path_factory.mktemp("stranger") / "split"
    keys = [f"run.dir={run}", *MESH, "train.accumulation=2"]
    train(recipe, keys, signals=Signals(), plans=True)
    return run


def numbers(run: Path) -> list[dict]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [one for one in records if "token_hash" in one]  # a step each


def held_out(run: Path) -> float:
    """The validation loss of the last evaluation."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [one["validation_loss"] for one in records if "validation_loss" in one][-1]


def test_losses_are_the_same_on_a_mesh_of_all_three_axes_in_microbatches(recipe, whole, split):
    alone, parts = numbers(whole), numbers(split)
    assert len(alone) == len(parts) == recipe["train"]["steps"]
    for one, other in zip(alone, parts, strict=True):
        assert other["token_hash"] == one["token_hash"]
        if "optim" in recipe:
            assert other["loss"] == pytest.approx(one["loss"], rel=CLOSE)
            assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=10 * CLOSE)
    if "optim" not in recipe:  # steps without a loss
        assert held_out(split) == pytest.approx(held_out(whole), rel=CLOSE)


@pytest.mark.long
def test_a_run_killed_and_started_again_ends_with_the_same_bits(recipe, whole, tmp_path):
    (tmp_path / "stranger.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    keys = [f"run.dir={run}", *ALONE]
    root = str(strangers.HERE.parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.strangers", "train", "stranger.yaml", *keys],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root, "XLA_FLAGS": quick(devices=8)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while (newest_step(run) or 0) < 1 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    train(str(tmp_path / "stranger.yaml"), keys, signals=Signals())
    assert weights(run) == weights(whole)


def test_the_state_that_is_planned_is_what_the_compiler_is_given(recipe, whole, split):
    for keys, run in ((ALONE, whole), (MESH, split)):
        described = describe(recipe, keys)
        planned = traced.trace(described, targets.of(described.devices))
        compiled = json.loads((run / PLAN).read_text())["measured"]["compiler_parts_bytes"]
        arguments = compiled["arguments"] + unread(planned.program)
        assert sum(memory.stored(planned).values()) == pytest.approx(arguments, rel=0.05)


def unread(program: Jaxpr) -> int:
    """Bytes of arguments that no operation reads, such as a head that is solved for.

    They are in memory, and the compiler is not told of them.
    """
    read = {str(x) for one in program.eqns for x in one.invars} | set(map(str, program.outvars))
    arrays: list[Any] = [x.aval for x in program.invars if str(x) not in read]
    shapes = [x.sharding.shard_shape(x.shape) for x in arrays]
    return sum(math.prod(s) * x.dtype.itemsize for s, x in zip(shapes, arrays, strict=True))


@pytest.mark.long
def test_a_plan_is_made_for_accelerators_that_are_not_here(recipe):
    for plan in api.plans([recipe], "v5e-8,h100", rows=1000):
        assert isinstance(plan, Plan) and plan.memory.total > 0, plan
        assert plan.time is not None and plan.time.seconds > 0, plan


def test_an_export_is_read_back_as_the_same_model(recipe, whole, tmp_path):
    form = "merged" if "adapter" in recipe else "model"
    folder = api.export(whole, tmp_path / "model", form=form).folder
    still = {"kind": "adamw", "learning_rate": 1e-30}  # in every group
    again = {**recipe, "model": {"path": str(folder)}, "optim": still}
    again.pop("adapter", None)
    again.pop("residual", None)  # which the export names itself
    if "optim" not in recipe:  # what was solved for is a head like any other
        again["objective"] = "next_token"
    keys = [f"run.dir={tmp_path / 'run'}", *ALONE, "train.steps=1"]
    train(again, keys, signals=Signals())
    assert held_out(tmp_path / "run") == pytest.approx(held_out(whole), rel=CLOSE)
