"""Answers by row: votes over variants, and what a run of puzzles saves of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests import strangers
from tests.sources import test_puzzles
from tests.sources.test_arc import task, write
from windlass import api
from windlass.cli.commands import run as program
from windlass.errors import UserError
from windlass.evaluation.answers import Ballot, Ranked, check_file
from windlass.processes.signals import Signals
from windlass.puzzles import arc
from windlass.training.train import train

RECIPE = yaml.safe_load((strangers.HERE / "recipes/recursive.yaml").read_text())


def test_most_votes_win_and_of_as_many_the_surest():
    answers = np.array([[1, 1], [2, 2], [2, 2], [3, 3], [3, 3]])
    ballot = Ballot(2)
    for answer, sure in zip(answers, (0.99, 0.2, 0.3, 0.1, 0.8), strict=True):
        ballot.cast(np.stack([answer, [7, 7]]), np.array([sure, 0.5]))
    ranked = ballot.ranked()
    assert ranked.answers.tolist() == [[[3, 3], [2, 2]], [[7, 7], [7, 7]]]
    assert ranked.votes.tolist() == [[2, 2], [5, 0]]


def test_a_row_passes_where_one_of_its_answers_is_right_wherever_that_weighs():
    answers = np.array([[[1, 2], [3, 4]], [[5, 6], [5, 6]], [[9, 9], [8, 9]]])
    ranked = Ranked(answers, np.array([[2, 1], [3, 0], [2, 1]]))
    targets = np.array([[3, 4], [5, 0], [0, 9]])
    weight = np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    assert ranked.passed(targets, weight) == {"pass@1": 1 / 3, "pass@2": 2 / 3}


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "a.npz").mkdir()
    with pytest.raises(UserError) as refused:
        check_file(tmp_path / "a.npz")
    assert str(refused.value) == f"--save is {tmp_path}/a.npz, a folder; it names a file"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Two steps of a tiny model on a few ARC tasks, of which two test pairs are held out."""
    place = tmp_path_factory.mktemp("arc")
    path = write(place / "training", a=task(0), b=task(1))
    evaluation = write(place / "evaluation", c=task(2), d=task(3))
    source = {"kind": "arc", "path": path, "evaluation": evaluation, "copies": 3}
    model = {"vocab": 12, "embed": 16, "mlp": 16, "heads": 1, "layers": 1, "h_cycles": 1}
    model |= {"l_cycles": 1, "passes": 2, "prefix": {"positions": 1, "identifiers": 13}}
    recipe = RECIPE | {
        "model": RECIPE["model"] | model,
        "data": {"source": source},
        "train": {"steps": 2, "batch": 2},
    }
    train(recipe, [f"run.dir={place / 'run'}", "device=cpu", "device.count=1"], signals=Signals())
    return place / "run"


@pytest.mark.long
def test_copies_of_a_task_vote_and_their_answers_are_saved(finished, tmp_path, capsys):
    file = tmp_path / "answers.npz"
    words = ["evaluate", str(finished), "--votes", "3", "--save", str(file), "--json"]
    assert program([*words, "device=cpu"], Signals()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["votes"], found["saved"]) == (3, str(file))
    saved: Any = np.load(file)
    assert saved["answers"].shape == (2, 2, 900) and saved["halt"].shape == (2, 2)
    assert saved["identifier"].tolist() == [7, 10] and saved["votes"].sum(axis=1).max() <= 3
    grids = [arc.cropped(one).tolist() for one in saved["targets"]]
    assert grids == [task(seed)["test"][0]["output"] for seed in (2, 3)]
    is_right = [
        [arc.cropped(one).tolist() == grid for one in own]
        for own, grid in zip(saved["elected"], grids, strict=True)
    ]
    passed = np.logical_or.accumulate(is_right, axis=1).mean(axis=0)
    assert [found["pass@1"], found["pass@2"]] == passed.tolist()


@pytest.mark.long
def test_more_votes_than_there_are_variants_are_refused(finished):
    for votes, what in (
        (0, "--votes is 0; it is a number of variants of each row, 1 or more"),
        (
            4,
            "--votes is 4, and a row of data.source.kind arc has 3 variants, itself included; 3 or "
            "less would do",
        ),
    ):
        with pytest.raises(UserError) as refused:
            api.evaluate(finished, ["device=cpu"], votes=votes)
        assert str(refused.value) == what


@pytest.mark.long
def test_votes_on_rows_that_have_no_variants_are_refused(finished, tmp_path, capsys):
    for split in ("train", "test"):
        test_puzzles.write(tmp_path / split, all=test_puzzles.arrays())
    arrays = f"data={{source: {{kind: puzzles, path: {tmp_path}}}, length: 6}}"
    words = ["evaluate", str(finished), "--votes", "8", arrays, "device=cpu"]
    assert program(words, Signals()) == 2
    assert capsys.readouterr().err.endswith(
        "--votes is 8, and a row of data.source.kind puzzles has no variant but itself: leave it "
        "out\n"
    )
