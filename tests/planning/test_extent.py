"""How long a run is, as far as that is known before it."""

from pathlib import Path

import pytest
from rich.console import Console

from tests import trained
from windlass.data import prepare
from windlass.planning import targets
from windlass.planning.extent import Extent, extent
from windlass.planning.traced import described
from windlass.program.described import Described

QUIET = Console(quiet=True)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """Documents that nobody has tokenised."""
    trained.write_corpus(tmp_path / "stories.jsonl", 40)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "stories.jsonl"


def asked(corpus: Path | str, **train: int | float | None) -> Described:
    """A run with a batch of 8 rows of 90."""
    recipe = trained.recipe(data={"source": {"kind": "jsonl", "path": str(corpus)}}, train=train)
    return described({**recipe, "by_device": {}}, targets.find("v5e-1"))


def test_the_rows_of_an_epoch_are_those_of_the_data_once_it_is_tokenised(corpus):
    run = asked(corpus)
    unknown = (
        "the number of sequences per epoch is not known, as the data is not tokenized yet; "
        "--rows N gives it"
    )
    assert extent(run) == Extent(8 * 90, 4, None, unknown)
    rows = len(prepare(run.run.data, run.run.tokenizer, console=QUIET).split("train"))
    assert extent(run) == Extent(8 * 90, 4, rows // 8)


def test_a_run_that_is_measured_in_epochs_is_worth_tokenising_its_data(corpus):
    run = asked(corpus, steps=None, epochs=2.5)
    found = extent(run, console=QUIET)
    rows = len(prepare(run.run.data, run.run.tokenizer, console=QUIET).split("train"))
    assert found == Extent(8 * 90, int(2.5 * (rows // 8)), rows // 8)


def test_rows_that_are_said_win_over_those_that_are_here(corpus):
    assert extent(asked(corpus, steps=None, epochs=3), rows=801) == Extent(720, 300, 100)


def test_generated_rows_are_known_and_folders_that_are_not_there_are_named():
    puzzles = described("sudoku-4x4", targets.find("v5e-1"))
    rows = len(prepare(puzzles.run.data, puzzles.run.tokenizer).split("train"))
    assert extent(puzzles) == Extent(64 * 16, 800, rows // 64)
    tasks = extent(described("trm-arc", targets.find("v5e-8")))
    assert (tasks.steps, tasks.epoch_steps) == (400_000, None)
    assert "data.source.path is ARC-AGI/data/training, which does not exist" in str(tasks.unknown)


def test_documents_elsewhere_are_not_asked_for():
    run = asked("gs://mine/stories.jsonl", steps=None, epochs=2)
    unknown = (
        "the number of sequences per epoch is not known, as the data is remote; --rows N gives it"
    )
    assert extent(run) == Extent(720, None, None, unknown)


def test_fewer_rows_than_a_batch_are_said_and_no_reason_to_refuse(corpus):
    unknown = "the data has 7 sequences, less than a batch of 8; --rows N gives more"
    assert extent(asked(corpus), rows=7) == Extent(720, 4, None, unknown)
