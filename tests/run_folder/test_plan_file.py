"""The plan of a run beside what was measured."""

import json

import pytest

from tests.training.campaign import RECIPE
from windlass.errors import UserError
from windlass.processes import hosts
from windlass.program.described import Described
from windlass.run_folder import plan_file
from windlass.run_folder.plan_file import Forecast
from windlass.starting.describe import describe

GIB = 2**30


class Stub:
    """A planner that says how often it was asked, or why it cannot answer."""

    def __init__(self, error: Exception | None = None):
        self.asked, self.error = 0, error

    def plan(self) -> dict:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {"memory": {"total_bytes": 1000 * self.asked}, "time": None}


def begin(file: Forecast, described: Described, stub: Stub) -> str | None:
    why = file.begin(described.run, described.facts["chose"], stub.plan)
    file.keep()
    return why


@pytest.fixture(scope="module")
def described() -> Described:
    return describe(RECIPE)


def whole(**measured) -> dict:
    planned = {"memory": {"total_bytes": 9.3 * GIB}, "time": {"step_seconds": 0.214}}
    return {"planned": planned, "measured": measured}


def test_the_plan_and_what_became_of_it_are_told_in_a_line():
    found = whole(device_peak_bytes=9.5 * GIB, compiler_bytes=9.4 * GIB, step_seconds=0.221)
    assert plan_file.line(found) == (
        "9.3 GiB and 214 ms per step predicted, 9.5 GiB and 221 ms measured (-2%, -3%)"
    )
    assert plan_file.line(whole()) == "9.3 GiB and 214 ms per step predicted"
    assert plan_file.errors(found) == pytest.approx(
        {
            "memory": 9.3 / 9.5 - 1,
            "compiler": 9.3 / 9.4 - 1,
            "device": 9.3 / 9.5 - 1,
            "time": 0.214 / 0.221 - 1,
        }
    )


def test_where_no_time_was_planned_none_is_told():
    found = {
        "planned": {"memory": {"total_bytes": GIB}, "time": None},
        "measured": {"compiler_bytes": 2 * GIB, "device_peak_bytes": None, "step_seconds": 0.1},
    }
    assert plan_file.line(found) == "1.0 GiB predicted, 2.0 GiB measured (-50%)"
    assert plan_file.line({"planned": None, "measured": {"step_seconds": 0.1}}) is None


def test_a_run_that_goes_on_keeps_its_plan_unless_its_devices_hold_something_else(
    described, tmp_path
):
    planner, file = Stub(), tmp_path / "plan.json"
    assert begin(Forecast(file), described, planner) is None
    first = Forecast(file)
    begin(first, described, planner)
    first.measured(step_seconds=0.5)
    again = Forecast(file)
    begin(again, describe(RECIPE, ["train.steps=70", "run.dir=elsewhere"]), planner)
    assert planner.asked == 2 and again.whole["measured"] == {}
    kept = Forecast(file)
    begin(kept, describe(RECIPE, ["train.steps=70"]), planner)
    assert planner.asked == 2
    begin(kept, describe(RECIPE, ["train.steps=70", "train.remat=full"]), planner)
    assert planner.asked == 3
    begin(kept, describe(RECIPE, ["train.steps=70", "device.count=4"]), planner)
    assert planner.asked == 4


def test_a_plan_that_cannot_be_made_is_a_note_and_no_end(described, tmp_path):
    file = tmp_path / "plan.json"
    why = begin(Forecast(file), described, Stub(KeyError("scan")))
    assert why == "this run could not be planned: KeyError: 'scan'"
    assert begin(Forecast(file), described, Stub(UserError("it is odd\nvery"))) == (
        "this run could not be planned: it is odd"
    )
    found = Forecast(file)
    begin(found, described, Stub(KeyError("scan")))
    found.measured(step_seconds=0.5)
    assert plan_file.read(file) == found.whole
    assert found.whole["planned"] is None and found.whole["measured"] == {"step_seconds": 0.5}


def test_a_plan_that_json_cannot_hold_is_a_note_too(described, tmp_path, monkeypatch):
    monkeypatch.setattr(Stub, "plan", lambda *_: {"time": {"step_seconds": float("inf")}})
    why = begin(Forecast(tmp_path / "plan.json"), described, Stub())
    assert why is not None and why.startswith("this run could not be planned: ValueError: Out of ")
    assert json.loads((tmp_path / "plan.json").read_text())["planned"] is None


def test_a_start_of_few_steps_does_not_replace_what_a_longer_one_measured(described, tmp_path):
    file = tmp_path / "plan.json"
    first = Forecast(file)
    begin(first, described, Stub())
    first.stepped(1000, step_seconds=0.5)
    again = Forecast(file)
    begin(again, described, Stub())
    again.stepped(1, step_seconds=3.0)
    again.stepped(0, step_seconds=None)
    assert json.loads(file.read_text())["measured"] == {"steps": 1000, "step_seconds": 0.5}
    again.stepped(1000, step_seconds=0.4)
    assert json.loads(file.read_text())["measured"] == {"steps": 1000, "step_seconds": 0.4}


def test_one_process_plans_and_writes(described, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_first", lambda: False)
    planner, file = Stub(), tmp_path / "plan.json"
    found = Forecast(file)
    assert begin(found, described, planner) is None
    found.measured(step_seconds=0.5)
    assert planner.asked == 0 and not file.exists()


def test_a_file_that_somebody_spoilt_is_refused_to_readers_and_replaced_by_runs(
    described, tmp_path
):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"planned": None}))
    with pytest.raises(UserError) as refused:
        plan_file.read(file)
    assert str(refused.value) == f"{file} is not as it was written: 'measured'; remove it"
    file.write_text(json.dumps({"planned": {"memory": 5}, "measured": {}}))
    with pytest.raises(UserError) as refused:
        plan_file.read(file)
    assert str(refused.value) == f"{file} is not as it was written: memory has no names; remove it"
    begin(Forecast(file), described, Stub())
    assert plan_file.read(file) is not None
