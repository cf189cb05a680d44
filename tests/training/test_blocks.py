"""A run on blocks: the same in one process and in two, and no text where there is no vocabulary."""

import os
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests import strangers
from tests.spawn import REPOSITORY, processes
from windlass import api
from windlass.errors import UserError
from windlass.processes.signals import Signals
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.metrics import read
from windlass.training.train import train

RECIPE = yaml.safe_load((strangers.HERE / "recipes" / "grid.yaml").read_text())
KEYS = ["telemetry.every=1", "train.evaluate_every=3", "checkpoint.every=3"]


def alone(folder: Path, *keys: str) -> str:
    """A run in this process; what it printed."""
    console = Console(record=True, width=1000, file=StringIO())
    with ConsoleReport(console) as report:
        words = [*KEYS, f"run.dir={folder}", *keys]
        train(RECIPE, words, signals=Signals(), report=report)
    return console.export_text()


def numbers(run: Path, name: str) -> list:
    return [record[name] for record in read(run / "metrics.jsonl") if name in record]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """Six steps over a little more than an epoch, on eight devices, and what they printed."""
    run = tmp_path_factory.mktemp("blocks") / "run"
    return run, alone(run)


def refused(*keys: str) -> str:
    with pytest.raises(UserError) as error:
        train(RECIPE, list(keys), signals=Signals())
    return str(error.value)


@pytest.mark.long
def test_a_run_counts_rows_and_tokens_and_names_its_columns(finished):
    run, printed = finished
    assert "of 16 tokens" in printed
    columns = "tokens, targets, weight, position, document, puzzle, candidates"
    assert f"27 rows of {columns}, 3 steps an epoch, 3 rows left out of each" in printed
    assert "unigram" not in printed and f"windlass evaluate {run}" in printed
    last = read(run / "metrics.jsonl")[-2]
    assert last["tokens"] == 6 * 8 * 16 and last["samples_per_second"] > 0
    assert not (run / "tokenizer").exists()
    assert yaml.safe_load((run / "recipe.yaml").read_text())["data"]["length"] == 16


@pytest.mark.long
def test_evaluation_is_the_same_each_time(finished):
    run, _ = finished
    measured = numbers(run, "validation_loss")[-1]
    assert api.evaluate(run)["loss"] == pytest.approx(measured, rel=1e-6)
    assert api.evaluate(run) == api.evaluate(run)


@pytest.mark.long
def test_two_processes_consume_the_same_rows_with_workers_too(finished, tmp_path):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(RECIPE))
    words = ["grid.yaml", *KEYS, "data.workers=1", f"run.dir={tmp_path / 'run'}"]
    # The parent, its child that trains and the worker of that each import the strangers at start.
    (tmp_path / "sitecustomize.py").write_text("import tests.strangers")
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    with processes(tmp_path, words, environ={"PYTHONPATH": path}) as running:
        first, second = running.finish()
    assert first.code == second.code == 0, first.output + second.output
    assert numbers(tmp_path / "run", "token_hash") == numbers(finished[0], "token_hash")
    for name in ("loss", "validation_loss"):
        expected = numbers(finished[0], name)
        assert numbers(tmp_path / "run", name) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_text_is_refused_where_there_is_no_vocabulary(finished):
    run, _ = finished
    said = (
        f"{run} was trained on blocks without a vocabulary, so that there is no text to generate; "
        f"`windlass evaluate {run}` measures its loss"
    )
    for call in (lambda: api.generate(run, "1 2"), lambda: api.chat(run)):
        with pytest.raises(UserError) as error:
            call()
        assert str(error.value) == said


def test_what_a_run_on_blocks_cannot_have_is_refused(tmp_path):
    folder = f"run.dir={tmp_path / 'run'}"
    assert refused(folder, "train.sample=One") == (
        'train.sample is "One", and the data has blocks without a vocabulary, so that there is no '
        "text; train.sample=null leaves samples out"
    )
    assert refused(folder, "model.vocab=4") == (
        "model.vocab is 4; the rows of data.source have 5 tokens, so it must be 5 or more"
    )
    assert refused(folder, "objective.kind=preference").splitlines()[1].split(maxsplit=1) == [
        "objective",
        "is preference, which reads the column reference; data.source has tokens, targets, weight, "
        "position, document, puzzle and candidates",
    ]
