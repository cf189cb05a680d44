"""What a run asks of planning: before its first step, and when memory runs out."""

import copy
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError
from rich.console import Console

import windlass
from tests.planning.test_exhausted import TPU
from tests.training.campaign import RECIPE
from windlass.checkpoint.store import folder_of, steps_in
from windlass.errors import UserError
from windlass.planning import changes, exhausted, planner, targets
from windlass.planning import memory as memories
from windlass.planning.changes import Change, Tried
from windlass.planning.memory import Memory
from windlass.planning.traced import described, trace
from windlass.run_folder import plan_file
from windlass.starting.describe import describe
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import Meter
from windlass.training import loop, report

# The step is that of the loop's own tests, and so compiled once for both.
KEYS = ["train.steps=6", "train.batch=16", "train.evaluate_every=null", "data.validation=0"]
KEYS += ["checkpoint.every=2"]


class Greedy(Meter):
    """Asks for more than any device has, after the third step."""

    taken = 0

    def step(self, result=None) -> None:
        super().step(result)
        self.taken += 1
        if self.taken == 4:
            jnp.zeros(2**50, jnp.uint8).block_until_ready()


def refused(folder: Path, *keys: str) -> str:
    console = Console(file=StringIO())
    with pytest.raises(UserError) as refusal, ConsoleReport(console) as told:
        windlass.train(copy.deepcopy(RECIPE), [*KEYS, f"run.dir={folder}", *keys], report=told)
    assert isinstance(refusal.value.__cause__, JaxRuntimeError)
    return str(refusal.value)


@pytest.mark.long
def test_memory_that_runs_out_ends_a_run_in_words_and_loses_no_checkpoint(tmp_path, monkeypatch):
    run = tmp_path / "run"
    tried = Tried([Change("train.remat=full", Memory({"weights": 1e6}, 10**7, 0.0), None)], None)
    monkeypatch.setattr(exhausted, "several", lambda traced, memory, too_low: tried)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "compile", _fails)
        happened, largest, *offered, left = refused(run).splitlines()
    assert re.fullmatch(
        r"out of memory while the step was compiled: a step needs about 900.0 GiB on each CPU, of "
        r"which a program may use \S+ GiB: \S+ GiB too much",
        happened,
    )
    assert left == "Nothing was trained yet: the same command with one of these begins again"
    monkeypatch.setattr(report, "Meter", Greedy)
    happened, *same, left = refused(run).splitlines()
    assert re.fullmatch(
        r"out of memory after step 3: a step needs about \S+ \wiB on each CPU, of which a program "
        r"may use \S+ GiB, and 1024.0 TiB more could not be allocated: something else holds memory "
        r"there, or this estimate is too low",
        happened,
    )
    assert same == [largest, *offered]
    assert largest.startswith("the most of it: ")
    assert offered == ["what would fit:", "  train.remat=full  976.6 KiB"]
    assert left == (
        f"Nothing up to step 2, the newest checkpoint in {run}, is lost: the same command with one "
        "of these goes on from there"
    )
    assert steps_in(folder_of(run)) == [0, 2]
    found = plan_file.read(run / "plan.json")
    assert found is not None and found["planned"]["memory"]["total_bytes"] > 0
    assert found["measured"]["compiler_bytes"] > 0 and found["measured"]["steps"] == 2


@pytest.mark.long
def test_other_devices_are_tried_while_a_run_has_its_own_mesh():
    target = targets.find("h200")
    with describe(copy.deepcopy(RECIPE)).scope():
        traced = trace(described(copy.deepcopy(RECIPE), target), target)
        nothing = memories.memory(traced)._replace(limit=1)
        found = changes.several(traced, nothing)
    assert {"on 2xh200", "on 4xh200"} < {one.keys for one in found.changes}


def _fails(self, stage: int) -> Callable:
    raise JaxRuntimeError(TPU.replace("31.66G", "900.00G"))


def test_a_fault_in_the_telling_does_not_hide_that_memory_ran_out(tmp_path, monkeypatch):
    def fails(described, target):
        raise KeyError("scan")

    monkeypatch.setattr(planner, "trace", fails)
    said = planner.explain(describe(RECIPE), f"{TPU}\nmore", "after step 3", tmp_path)
    assert said == (
        f"out of memory after step 3: {TPU}\n"
        "what fills it is not known (KeyError: 'scan')\n"
        "Nothing was trained yet: the same command begins again"
    )


def test_any_other_error_of_jax_is_a_fault_and_is_raised():
    asked: Any = SimpleNamespace(plans=True)
    with pytest.raises(JaxRuntimeError, match="INTERNAL: no"):
        with loop.Loop.explains_exhaustion(asked, None):
            raise JaxRuntimeError("INTERNAL: no")
