"""Preferences are learned against the weights of the start, which are asked once and for all."""

import json
import shutil
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import windlass
from tests import tiny
from windlass.checkpoint import archive
from windlass.data import reference
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.telemetry import metrics
from windlass.telemetry.console import ConsoleReport

WORDS = "ash bay cedar dune elm fern gale heath iris jade".split()
RECIPE = {
    "model": {"family": "llama", "vocab": 257, **tiny.WIDTHS},
    "tokenizer": {"kind": "byte"},
    "data": {
        "source": {"kind": "jsonl", "path": "pairs.jsonl"},
        "format": "pairs",
        "length": 64,
        "validation": 0.2,
        "test": 0.1,
    },
    "objective": {"kind": "preference", "beta": 0.5},
    "adapter": {"kind": "lora", "rank": 4, "alpha": 8},
    "optim": {"kind": "adamw", "learning_rate": 1e-2},
    "train": {"steps": 24, "batch": 16},
    "checkpoint": {"every": 12, "keep": 8},
    "telemetry": {"every": 1},
    "device": {"kind": "cpu", "count": 1},
}


def write(place: Path, count: int = 100) -> None:
    """Of any word the answer in capitals is preferred to that with a question mark."""
    rows = []
    for number in range(count):
        word = f"{WORDS[number % 10]} {WORDS[number // 10]}"
        rows.append({"prompt": f"{word}: ", "chosen": word.upper(), "rejected": f"{word}?"})
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*words: str) -> tuple[Path, str]:
    console = Console(file=StringIO(), width=1000)
    with ConsoleReport(console) as report:
        found = windlass.train(RECIPE, ["run.dir=run", *words], report=report)
    assert found.folder == Path("run")
    return found.folder, console.file.getvalue()  # pyright: ignore


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of 24 steps."""
    place = tmp_path_factory.mktemp("preference")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write(place)
        train()
    return place


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, to be changed, which is the current folder."""
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("run")


def records(run: Path) -> list[dict]:
    return [one for one in metrics.read(run / folders.METRICS) if "loss" in one]


@pytest.mark.long
def test_pairs_are_told_apart_after_few_steps_those_held_out_as_well(trained):
    first, *_, last = records(trained / "run")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)  # nothing has moved yet
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["accuracy"] == 1
    assert last["margin"] > 1
    assert last["rewards_chosen"] > 0 > last["rewards_rejected"]
    held_out = [one for one in metrics.read(trained / "run/metrics.jsonl") if "step" in one][-1]
    assert held_out["validation_accuracy"] == 1
    assert "validation_perplexity" not in held_out  # of pairs there is none


def fingerprints(run: Path) -> dict:
    return archive.manifest(run / "checkpoints/24")["arrays"]


@pytest.mark.long
def test_a_run_goes_on_from_half_with_the_column_it_has_and_ends_in_the_same_bits(trained, here):
    asked = (here / "reference/about.json").stat().st_mtime_ns
    shutil.rmtree(here / "checkpoints/24")
    _, said = train()
    assert "resuming from step 12 of 24" in said
    assert (here / "reference/about.json").stat().st_mtime_ns == asked
    assert fingerprints(here) == fingerprints(trained / "run")


@pytest.mark.long
def test_a_run_that_was_killed_while_it_asked_asks_again_and_ends_in_the_same_bits(trained, here):
    shutil.rmtree(here / "checkpoints")
    for name in (folders.METRICS, folders.ABOUT):  # it had not come to a step
        (here / name).unlink()
    (here / "reference").rename(here / "reference.partial")
    (here / "reference.partial/about.json").unlink()
    (here / "reference.partial/train-0.npy").write_bytes(b"half of it")
    train()
    assert not (here / "reference.partial").exists()
    assert fingerprints(here) == fingerprints(trained / "run")
    for name in ("train-0", "validation-0", "test-0"):
        again, once = (run / f"reference/{name}.npy" for run in (here, trained / "run"))
        assert again.read_bytes() == once.read_bytes()


@pytest.mark.long
def test_an_evaluation_reads_the_column_of_its_rows(here):
    found = windlass.evaluate(here, split="test")
    told = metrics.last(here / folders.METRICS, "validation_loss")
    assert told is not None
    for name in ("loss", "accuracy", "margin", "logps_chosen"):
        assert found[f"validation_{name}"] == pytest.approx(told[f"validation_{name}"], rel=1e-5)
    assert found["accuracy"] == 1
    assert found["verdict"].startswith("generalises")


def refusal(call, *words) -> str:
    with pytest.raises(UserError) as refused:
        call(*words)
    return str(refused.value)


@pytest.mark.long
def test_other_rows_than_the_run_has_the_column_of_are_refused(here):
    assert refusal(windlass.evaluate, here, ["data.length=48"]) == (
        "run/reference has what the run's first weights gave every target of its own rows, and "
        "these validation rows are others. Take the change back, or start another run with run.dir"
    )


@pytest.mark.long
def test_a_column_that_is_damaged_or_gone_is_refused_where_weights_were_trained_since(here):
    shutil.rmtree(here / "checkpoints/24")
    file = here / "reference/train-0.npy"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert refusal(train) == (
        "run/reference/train-0.npy is not as it was written; put it back from a copy, or start "
        "another run with run.dir"
    )
    shutil.rmtree(here / "reference")
    assert refusal(train) == (
        "run/reference is gone, where the run has what its first weights gave every target; they "
        "have been trained since. Put it back from a copy, or start another run with run.dir"
    )


@pytest.mark.long
def test_deleting_a_run_deletes_its_column(here):
    (here / "reference.partial").mkdir()
    assert windlass.delete(here) == []
    assert not here.exists()


def test_a_column_without_its_manifest_is_found_damaged_and_no_column_is_none(tmp_path):
    assert reference.damaged(tmp_path) == []
    (tmp_path / "reference").mkdir()
    np.save(tmp_path / "reference/train-0.npy", np.zeros(3, np.float32))
    assert reference.damaged(tmp_path) == ["reference/about.json"]
