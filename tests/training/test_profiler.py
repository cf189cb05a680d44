"""Profiles of a run: traces where they are looked for, and a table of operations."""

import gzip
import json
from io import StringIO
from pathlib import Path

import jax
import pytest
from rich.console import Console

from tests.training.campaign import RECIPE, Stops
from windlass.errors import UserError
from windlass.telemetry.console import ConsoleReport
from windlass.training.profiler import TABLE
from windlass.training.train import train

KEYS = ["run.dir=run", "data.validation=0", "train.evaluate_every=null", "train.accumulation=null"]
KEYS += ["checkpoint.every=1000", "train.steps=6"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(*keys: str, stops: int | None = None) -> list[str]:
    """Lines that a run printed."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        train(RECIPE, [*KEYS, *keys], signals=Stops(stops), report=report)
    return console.export_text().splitlines()


def traces() -> list[Path]:
    return sorted(Path("run/plugins/profile").glob("*"))


def test_steps_are_traced_and_their_operations_listed_by_part():
    lines = trained("profile.steps=[3,4]")
    (folder,) = traces()
    (start,) = [i for i, line in enumerate(lines) if line.startswith("profile of steps")]
    assert lines[start] == f"profile of steps 3 to 4 in {folder}"
    shares = lines[start + 1].partition(" per step: ")[2].split(", ")
    parts = [share.rpartition(" ")[0] for share in shares]
    assert {"attention", "mlp", "head", "norm", "optimizer", "embedding", "residual"} <= {*parts}
    assert lines[start + 2].split() == (
        "part operation in the trace ms per step share calls".split()
    )
    table = lines[start : start + 13]
    assert (folder / TABLE).read_text().splitlines() == table

    (trace,) = folder.glob("*.trace.json.gz")  # as Perfetto opens it
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len([one for one in events if one.get("name") == "train"]) == 2
    (raw,) = folder.glob("*.xplane.pb")  # as XProf opens it
    (host,) = [
        plane
        for plane in jax.profiler.ProfileData.from_file(str(raw)).planes
        if plane.name == "/host:CPU"
    ]
    steps = {
        dict(event.stats).get("step_num")
        for line in host.lines
        for event in line.events
        if event.name == "train"
    }
    assert steps == {3, 4}


@pytest.mark.long
def test_a_run_that_is_stopped_amid_has_a_profile_of_the_steps_it_took_and_none_after():
    lines = trained("profile.steps=[2,5]", stops=3)
    assert [line for line in lines if line.startswith("profile of steps 2 to 3 in ")]
    again = trained("profile.steps=[2,5]")
    said = "profile.steps is [2, 5], and this start begins after step 3: nothing is profiled"
    assert said in again and len(traces()) == 1


@pytest.mark.long
def test_a_process_that_is_profiled_already_trains_without(tmp_path):
    with jax.profiler.trace(tmp_path / "mine"):
        lines = trained("profile.steps=[2,3]", "train.steps=3")
    (warning,) = [line for line in lines if "nothing is profiled" in line]
    assert warning.startswith("warning: nothing is profiled: ") and traces() == []
    assert list((tmp_path / "mine").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("[13,10]", "is [13, 10]; the first step comes before the last: [10, 13] would do"),
        ("[10]", "is [10]; it must be two numbers, the first and the last step, as [10, 13]"),
        ("[0,3]", "is [0, 3]; steps are counted from 1"),
        ("[5,9]", "is [5, 9], and the run has 6 steps; steps up to 6 would do"),
        ("10", "is 10; it must be a list, each item a whole number, or null"),
        (
            "[1,500]",
            "is [1, 500]; a trace of more than 100 steps is too large to be looked at: [1, 100] "
            "would do",
        ),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(keys, said):
    with pytest.raises(UserError) as refused:
        trained(f"profile.steps={keys}")
    assert str(refused.value) == (
        f"1 problem in the recipe and the command line:\n  profile.steps  {said}"
    )


def test_steps_past_the_last_epoch_are_refused():
    keys = ["train.steps=null", "train.epochs=0.05", "profile.steps=[50,60]"]
    with pytest.raises(UserError) as refused:
        trained(*keys)
    assert str(refused.value).startswith("profile.steps is [50, 60], and the run has ")
