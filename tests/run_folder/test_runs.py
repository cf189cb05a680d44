"""Where runs stand, and what goes when one is deleted."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import windlass
from tests import rights, trained
from windlass import api
from windlass.cli.runs import as_json
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.telemetry.about import About
from windlass.telemetry.metrics import Metrics


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that ended; nobody may change it."""
    return trained.only_run(trained.workplace(tmp_path_factory))


def invent(folder: Path, *, told: int, saved: int, steps: int = 10) -> Path:
    """As much of a run that was killed as its folder tells of it."""
    (folder / f"checkpoints/{saved}").mkdir(parents=True)
    (folder / folders.RECIPE).write_text(f"train: {{steps: {steps}}}\n")
    About(folder / folders.ABOUT).begin(step=0, recipe="mine", command_line={}, chose={})
    records = Metrics(folder / folders.METRICS)
    records.write(1, {"loss": 9.0})
    records.write(1, {"validation_loss": 8.5})
    records.write(told, {"loss": 7.0})
    return folder


def refusal(*names: str | Path) -> str:
    with pytest.raises(UserError) as refused:
        windlass.delete(*names)
    return str(refused.value)


def test_a_finished_run_stands_at_its_last_step_with_its_losses(finished):
    records = [json.loads(line) for line in (finished / folders.METRICS).read_text().splitlines()]
    (found,) = windlass.runs(finished.parent)
    assert (found.folder, found.recipe, found.state) == (finished, "tiny", "finished")
    assert (found.step, found.steps) == (4, 4)
    assert found.loss == [one["loss"] for one in records if "loss" in one][-1]
    assert found.validation_loss == records[-1]["validation_loss"]
    files = [path for path in finished.rglob("*") if path.is_file()]
    assert found.size_bytes == sum(path.stat().st_size for path in files)
    assert found.changed == pytest.approx(records[-1]["time"], abs=1)


def test_a_run_that_was_killed_stands_where_it_would_go_on(here):
    run = invent(here / "runs/elsewhere", told=7, saved=5)
    (found,) = windlass.runs()
    assert found.folder == run.relative_to(here)
    assert (found.state, found.step, found.steps, found.recipe) == ("stopped", 5, 10, "mine")
    assert (found.loss, found.validation_loss) == (7.0, 8.5)


def test_a_run_that_is_being_trained_stands_at_the_step_it_told_last(here):
    run = invent(here / "runs/mine-11111111", told=7, saved=5)
    with folders.locked(run):
        (found,) = windlass.runs()
        assert (found.state, found.step) == ("training", 7)
        # Looking does not take the lock from anybody.
        assert windlass.runs() == [found]
    assert windlass.runs()[0].state == "stopped"


def test_a_run_whose_recipe_was_spoilt_is_listed_all_the_same(here):
    run = invent(here / "runs/mine-11111111", told=7, saved=5)
    (run / folders.RECIPE).write_text("train: [")
    assert windlass.runs()[0].steps is None


def test_runs_are_listed_newest_first_and_nothing_else_is(here):
    for number, name in enumerate(["older", "newer"]):
        recipe = invent(here / "runs" / name, told=2, saved=0) / folders.RECIPE
        os.utime(recipe, (number, number))
    (here / "runs/notes").mkdir()
    assert [one.folder.name for one in windlass.runs()] == ["newer", "older"]
    assert windlass.runs(here / "nowhere") == []


def test_a_loss_that_is_not_finite_is_listed_in_valid_json(here):
    run = invent(here / "runs/mine-11111111", told=7, saved=5)
    Metrics(run / folders.METRICS).write(8, {"loss": float("nan")})
    (record,) = json.loads(as_json(windlass.runs()), parse_constant=pytest.fail)
    assert record["loss"] == "NaN" and record["folder"] == "runs/mine-11111111"


def test_deleting_leaves_nothing_of_what_a_run_writes(finished, here):
    shutil.copytree(finished, here / "runs" / finished.name)
    for left in ("compile.jsonl.17.partial", "tokenizer/tokenizer.json.17.partial"):  # by a kill
        (here / "runs" / finished.name / left).touch()
    invent(here / "runs/other", told=2, saved=0)
    assert windlass.delete("tiny", finished.name) == []  # by two names
    assert os.listdir("runs") == ["other"]


def test_what_a_run_did_not_write_is_left_and_named(here):
    run = invent(here / "runs/mine-11111111", told=7, saved=5)
    (run / "notes.md").write_text("Do not lose this.")
    assert windlass.delete("mine-11111111") == [Path("runs/mine-11111111/notes.md")]
    assert os.listdir(run) == ["notes.md"]


def test_a_run_that_may_not_be_deleted_is_left_and_named(here):
    run = invent(Path("runs/mine-11111111"), told=3, saved=2)
    before = sorted(run.rglob("*"))
    with rights.read_only(run):
        said = refusal(run)
    file = run / folders.METRICS
    what = "cannot be deleted, and is there still or in part"
    assert said == f"{run} {what}: {file}: Permission denied"
    assert sorted(run.rglob("*")) == before


def test_where_one_run_cannot_be_deleted_none_is(here):
    mine = invent(here / "runs/mine-11111111", told=7, saved=5)
    busy = invent(here / "runs/busy-22222222", told=7, saved=5)
    with folders.locked(busy):
        assert refusal("mine-11111111", "busy-22222222") == (
            f"runs/busy-22222222 is being trained by process {os.getpid()}; "
            f"stop that first: Ctrl-C, or kill {os.getpid()}"
        )
    (here / "folder").mkdir()
    assert refusal("mine-11111111", "folder").startswith(
        "folder is not a run: it has no recipe.yaml; there are "
    )
    (here / "runs/link").symlink_to(mine)
    assert refusal("runs/link") == (
        f"runs/link is a link to {mine}; name that folder to delete the run"
    )
    assert api.is_run(mine) and api.is_run(busy)


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (
            folders.ABOUT,
            "{}",
            "is not as it was written; put back a copy, or remove it: it says when the run was "
            "started and its test rows were looked at, and nothing is computed from it",
        ),
        (folders.METRICS, '"step"\n', "is no record"),
    ],
)
def test_a_file_that_somebody_spoilt_is_named_beside_the_other_runs(here, file, content, why):
    spoilt = invent(here / "runs/mine-11111111", told=7, saved=5)
    invent(here / "runs/good-11111111", told=7, saved=5)
    (spoilt / file).write_text(content)
    found = {run.folder.name: run for run in windlass.runs()}
    assert found["good-11111111"].damage is None
    told = found["mine-11111111"]
    assert (told.state, told.step) == ("damaged", 5)
    assert told.damage is not None and f"runs/mine-11111111/{file}" in told.damage
    assert why in told.damage
    assert windlass.delete("mine-11111111") == [] and not spoilt.exists()


def test_the_age_is_counted_from_the_last_record(here):
    run = invent(here / "runs/mine-11111111", told=7, saved=5)
    then = time.time() - 3600
    os.utime(run / folders.METRICS, (then, then))
    assert windlass.runs()[0].changed == pytest.approx(then)
