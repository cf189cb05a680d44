"""Overrides as Python writes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.config import load, words
from windlass.errors import UserError

VALUES = {
    "number": 5,
    "small": 1e-5,
    "truth": True,
    "nothing": None,
    "word": "cpu",
    "digits": "5",
    "null": "null",
    "empty": "",
    "yaml": "Tom: hello, [you] # there",
    "lines": "one\ntwo",
    "quotes": 'it\'s "so"',
    "several": [500, "15min"],
    "sections": [{"kind": "jsonl", "path": "a.jsonl"}],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_python_is_the_same_as_an_override(name):
    for given in ({f"train.{name}": VALUES[name]}, {"train": {name: VALUES[name]}}):
        assert load({}, words(given)).command_line == {"train": {name: VALUES[name]}}


def test_a_list_a_mapping_one_text_and_keywords_are_the_same_words():
    expected = ["train.steps=5"]
    assert words(expected) == words(tuple(expected)) == expected
    assert words("train.steps=5") == expected
    assert words({"train.steps": 5}) == words({"train": {"steps": 5}}) == expected
    assert words((), {"train": {"steps": 5}}) == expected
    assert words(expected, {"train": {"batch": 2}}) == ["train.steps=5", "train.batch=2"]


def test_numbers_of_numpy_and_paths_are_plain_values():
    given = {
        "train.steps": np.int64(5),
        "optim.learning_rate": np.float64(0.5),
        "run.dir": Path("x"),
        "optim.betas": np.array([0.5, 0.25]),
    }
    expected = ["train.steps=5", "optim.learning_rate=0.5", "run.dir=x", "optim.betas=[0.5, 0.25]"]
    assert words(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [5],
            "overrides is [5]; it must be a list such as ['train.steps=5'], or a mapping such as "
            "{'train.steps': 5}",
        ),
        (
            {"train.steps": 3 + 4j},
            "train.steps is (3+4j); a value is a number, text, true, false, null, a list or a "
            "mapping",
        ),
    ],
)
def test_what_is_no_override_is_refused(given: Any, said):
    with pytest.raises(UserError) as refused:
        words(given)
    assert str(refused.value) == said
