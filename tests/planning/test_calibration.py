"""Plans are put right by what runs took."""

import json

import pytest

import windlass
from windlass.errors import UserError
from windlass.planning import calibration

TRUE = {"compute": 1.3, "memory": 0.8}
RUNS = [(0.30, 0.05), (0.10, 0.12), (0.20, 0.02), (0.05, 0.20)]


@pytest.fixture(autouse=True)
def of_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def run(folder, compute, memory, *, chip="H200", factors=None, measured=None):
    """A run that took what the true factors make of the table's times."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("train: {steps: 1}\n")
    by = factors or {}
    parts = {"matmuls": compute * 0.7, "attention": compute * 0.2, "head": compute * 0.1}
    parts = {name: value * by.get("compute", 1) for name, value in parts.items()}
    parts["elementwise"] = memory * by.get("memory", 1)
    took = TRUE["compute"] * compute + TRUE["memory"] * memory
    planned = {"target": {"chip": chip}, "time": {"parts_seconds": parts, "factors": factors}}
    whole = {"of": "1", "planned": planned, "measured": {"step_seconds": measured or took}}
    (folder / "plan.json").write_text(json.dumps(whole))
    return folder


def test_factors_that_made_the_times_are_found_and_plans_come_nearer(tmp_path):
    places = [run(tmp_path / "runs" / f"r-{i}", *parts) for i, parts in enumerate(RUNS)]
    (found,) = windlass.calibrate(*places)
    assert found.factors == pytest.approx(TRUE, abs=0.1)
    assert found.before > 0.1 and found.after < 0.05
    assert calibration.find("H200") == found
    assert calibration.find("H100") is None
    told = calibration.scaled({"matmuls": 1.0, "optimiser": 1.0, "host": 1.0}, found.factors)
    assert list(told.values()) == [found.factors["compute"], found.factors["memory"], 1.0]


# Of Qwen2.5-0.5B on an H200, as it was measured: seconds of compute, of memory, of a step.
MEASURED = [
    (0.1909, 0.0546, 0.2464),
    (0.2251, 0.0411, 0.2733),
    (0.1764, 0.0687, 0.2318),
    (0.1909, 0.0546, 0.2502),
    (0.2662, 0.0546, 0.3070),
]


def test_a_table_that_runs_do_not_make_better_stays_as_it_is(tmp_path):
    for i, (compute, memory, took) in enumerate(MEASURED):
        run(tmp_path / "runs" / f"r-{i}", compute, memory, measured=took)
    (found,) = windlass.calibrate()
    assert found.factors == {"compute": 1.0, "memory": 1.0}
    off = [abs((compute + memory) / took - 1) for compute, memory, took in MEASURED]
    assert found.after == found.before == pytest.approx(sorted(off)[2])
    assert found.error == pytest.approx(max(off))


def test_runs_that_were_planned_with_factors_are_held_against_the_table(tmp_path):
    for i, parts in enumerate(RUNS):
        run(tmp_path / "runs" / f"r-{i}", *parts, factors={"compute": 1.2, "memory": 2.0})
    (found,) = windlass.calibrate()
    assert found.factors == pytest.approx(TRUE, abs=0.1)


def test_few_runs_are_refused_with_how_many_there_are(tmp_path):
    for i in range(2):
        run(tmp_path / "runs" / f"r-{i}", 0.1, 0.1)
    run(tmp_path / "runs" / "v-0", 0.1, 0.1, chip="TPU v5e")
    with pytest.raises(UserError) as refused:
        windlass.calibrate()
    assert str(refused.value) == (
        "3 runs on the same chip are needed, each with a plan and a measured step; there are 1 on "
        "TPU v5e and 2 on H200. A run has both when it has ended: "
        "windlass plan --calibrate RUN RUN RUN"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"H200": {"factors": {}}}'])
def test_a_spoilt_file_is_named(text):
    calibration.file().parent.mkdir(parents=True)
    calibration.file().write_text(text)
    with pytest.raises(
        UserError, match=r"efficiency\.json is not as it was written: .*; remove it"
    ):
        calibration.find("H200")
