"""The throughput alarm: each of its causes, provoked in a run."""

import re
import time
from collections.abc import Iterator
from io import StringIO

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tests.training.campaign import RECIPE
from windlass.data.load import Loader
from windlass.processes.signals import Signals
from windlass.telemetry import alarm
from windlass.telemetry.console import ConsoleReport
from windlass.training import loop
from windlass.training.train import train

KEYS = ["run.dir=run", "data.validation=0", "train.evaluate_every=null", "train.accumulation=null"]
KEYS += ["checkpoint.every=1000", "train.steps=12"]
UNREACHABLE = "alarm.tokens_per_second=1e9"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(alarm, "SHORTEST", 0.5)  # seconds: these runs are short


def alarms(*keys: str, console: Console | None = None) -> list[str]:
    """The alarms of a run, which are warnings of its throughput."""
    console = console or Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        train(RECIPE, [*KEYS, *keys], signals=Signals(), report=report)
    lines = console.export_text().splitlines()
    return [line for line in lines if line.startswith("warning: throughput is ")]


def cause(warned: list[str]) -> str:
    """The cause that a run's only alarm names."""
    (line,) = warned
    found = re.fullmatch(
        r"warning: throughput is \S+ tok/s over the last \d+ steps, below "
        r"alarm.tokens_per_second \(1e\+09\): \d+% of the time is (.*?); .+",
        line,
    )
    assert found is not None, line
    return found[1]


class LateBatches(Loader):
    """Batches of a slow source."""

    def iterate(self, *arguments) -> Iterator[dict[str, jax.Array]]:
        for batch in super().iterate(*arguments):
            time.sleep(0.4)
            yield batch


class GrowingBatches(Loader):
    """Batches of which each has more rows than the one before."""

    def iterate(self, *arguments) -> Iterator[dict[str, jax.Array]]:
        for number, batch in enumerate(super().iterate(*arguments), start=1):
            yield {name: jnp.concatenate([x] * number) for name, x in batch.items()}


def test_a_slow_source_is_named(monkeypatch):
    monkeypatch.setattr(loop, "Loader", LateBatches)
    assert cause(alarms(UNREACHABLE)) == "waiting for data"


@pytest.mark.long
def test_slow_checkpoints_are_named():
    assert cause(alarms(UNREACHABLE, "checkpoint.every=1")) == "saving checkpoints"


@pytest.mark.long
def test_programs_that_are_compiled_again_are_named(monkeypatch):
    monkeypatch.setattr(loop, "Loader", GrowingBatches)
    assert cause(alarms(UNREACHABLE, "train.steps=8")) == "compiling programs again"


class SlowTerminal(StringIO):
    """A terminal at the end of a slow connection: a line takes a while."""

    def write(self, text: str) -> int:
        if "step" in text:
            time.sleep(0.4)
        return super().write(text)


@pytest.mark.long
def test_slow_logging_is_named():
    console = Console(record=True, width=1000, file=SlowTerminal())
    assert cause(alarms(UNREACHABLE, console=console)) == "logging"


@pytest.mark.long
def test_steps_that_are_slow_by_themselves_are_said_to_be(monkeypatch):
    monkeypatch.setattr(alarm, "SHORTEST", 0.0)
    (line,) = alarms(UNREACHABLE, "telemetry.every=4", "train.steps=40")
    assert "and the steps themselves are slow (waiting for data " in line


@pytest.mark.long
def test_a_run_that_is_fast_enough_has_no_alarm(monkeypatch):
    monkeypatch.setattr(alarm, "SHORTEST", 0.0)
    assert alarms("alarm.tokens_per_second=0.01", "train.steps=10") == []
    assert alarms("train.steps=24") == []  # no speed is planned for a CPU
