"""Puzzles in arrays: two layouts of files, a puzzle of each group in an epoch, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.columns import Picture
from windlass.data import Data, prepare
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources.puzzles import Source

ABOUT = {
    **{"seq_len": 6, "vocab_size": 12, "num_puzzle_identifiers": 9, "pad_id": 0},
    **{"ignore_label_id": 0, "blank_identifier_id": 0, "sets": ["all"], "total_groups": 3},
}


def arrays(seed: int = 0) -> dict[str, Any]:
    """Three groups, of 2, 3 and 1 puzzles, with 2, 1 and 3 examples in each puzzle of them."""
    sizes = [2, 2, 1, 1, 1, 3]
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, 12, size=(sum(sizes), 6)).astype(np.int8)
    labels = np.where(rng.random(inputs.shape) < 0.3, 0, inputs[:, ::-1])
    return {
        **{"inputs": inputs, "labels": labels.astype(np.int32)},
        "puzzle_indices": np.cumsum([0, *sizes]).astype(np.int32),
        "group_indices": np.array([0, 2, 5, 6], np.int32),
        "puzzle_identifiers": np.array([1, 2, 3, 4, 5, 8], np.int32),
    }


def write(folder: Path, about: Any = ABOUT, nested: bool = False, **sets: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = about if isinstance(about, str) else json.dumps(about)
    (folder / "dataset.json").write_text(text)
    for name, fields in sets.items():
        for field, values in fields.items():
            file = folder / (f"{name}/{field}.npy" if nested else f"{name}__{field}.npy")
            file.parent.mkdir(exist_ok=True)
            np.save(file, values)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    write(tmp_path / "train", all=arrays())
    write(tmp_path / "test", all=arrays(1), nested=True)
    return Source(path=str(tmp_path))


def test_every_example_of_what_is_held_out_is_a_row(source: Source):
    data = prepare(Data(source=source), Tokenizer())
    assert {name: len(rows) for name, rows in data.splits.items()} == {"train": 6, "validation": 10}
    rows = data.split("validation").batch(range(10))
    given = arrays(1)
    assert (rows["tokens"] == given["inputs"]).all() and (rows["targets"] == given["labels"]).all()
    assert ((given["labels"] != 0) == (rows["weight"] == 1)).all()
    assert rows["identifier"].tolist() == [1, 1, 2, 2, 3, 4, 5, 8, 8, 8]
    assert data.columns.keys() == rows.keys() and data.identifiers == 9 and data.vocab == 12


def test_a_row_is_drawn_as_a_square_where_it_is_one(source: Source, tmp_path: Path):
    assert source.picture is None  # of 6 cells
    fields = arrays()
    for name in ("inputs", "labels"):
        fields[name] = np.pad(fields[name], ((0, 0), (0, 3)))
    write(tmp_path / "squares/train", ABOUT | {"seq_len": 9}, all=fields)
    assert Source(path=str(tmp_path / "squares"), validation=None).picture == Picture(3)


def test_an_epoch_has_all_examples_of_one_puzzle_of_each_group(source: Source):
    numbers, given = np.arange(6), arrays()
    plain = source.rows(numbers, None, 0)
    assert plain["identifier"].tolist() == [1, 1, 3, 8, 8, 8]
    assert (plain["tokens"] == given["inputs"][[0, 1, 4, 7, 8, 9]]).all()
    seen = set()
    for epoch in range(40):
        rows = source.rows(numbers, np.full(6, epoch), 3)
        seen.add(tuple(rows["identifier"].tolist()))
        which = [np.flatnonzero((given["inputs"] == row).all(1)).item() for row in rows["tokens"]]
        assert (rows["targets"] == given["labels"][which]).all()
        assert len({*which}) == 6 and which[3:] == [7, 8, 9]
    assert seen == {(a, a, b, 8, 8, 8) for a in (1, 2) for b in (3, 4, 5)}
    alone = source.rows(numbers[2:3], np.full(1, 39), 3)
    assert (alone["tokens"] == rows["tokens"][2:3]).all()


def test_sets_are_joined_and_iterations_are_a_column_where_all_have_them(tmp_path: Path):
    about = ABOUT | {"sets": ["one", "two"], "num_sequence_identifiers": 9}
    del about["num_puzzle_identifiers"]
    of_puzzles, of_examples = np.arange(6), np.arange(20, 30)
    sets = [
        arrays(seed) | {"iteration_targets": x} for seed, x in enumerate((of_puzzles, of_examples))
    ]
    write(tmp_path / "train", about, one=sets[0], two=sets[1])
    source = Source(path=str(tmp_path), validation=None)
    rows = source.rows(np.arange(12), None, 0)
    assert rows["iterations"].tolist() == [0, 0, 2, 5, 5, 5, 20, 21, 24, 27, 28, 29]
    assert (rows["tokens"][6:] == arrays(1)["inputs"][[0, 1, 4, 7, 8, 9]]).all()
    assert rows["identifier"].tolist() == 2 * [1, 1, 3, 8, 8, 8]
    assert "iterations" in source.columns and source.held_out == ()


def test_padding_of_labels_is_ignored_but_for_the_end_of_a_text(tmp_path: Path):
    given = arrays()
    given["labels"] = np.full((10, 6), -100)
    given["labels"][:, :5] = [4, 5, 7, 7, 7]
    about = ABOUT | {"pad_id": 7, "eos_id": 7, "ignore_label_id": -100}
    write(tmp_path / "train", about, all=given)
    rows = Source(path=str(tmp_path), validation=None).rows(np.arange(2), None, 0)
    assert rows["weight"].tolist() == [[1, 1, 1, 0, 0, 0]] * 2
    assert rows["targets"].tolist() == [[4, 5, 7, 0, 0, 0]] * 2
    write(tmp_path / "train", about | {"eos_id": 6}, all=given)
    rows = Source(path=str(tmp_path), validation=None).rows(np.arange(1), None, 0)
    assert rows["weight"].tolist() == [[1, 1, 0, 0, 0, 0]]


def test_the_fingerprint_is_of_the_content(source: Source, tmp_path: Path):
    first = source.fingerprint()
    write(tmp_path / "copy/train", all=arrays())
    write(tmp_path / "copy/test", all=arrays(1))
    assert Source(path=f"{tmp_path}/copy").fingerprint() == first
    write(tmp_path / "copy/test", all=arrays(2))
    assert Source(path=f"{tmp_path}/copy").fingerprint() != first


@pytest.mark.parametrize(
    ("about", "fields", "what"),
    [
        ("{", {}, "dataset.json cannot be read: "),
        ("[]", {}, "dataset.json is []; it is an object with seq_len, ..."),
        (
            {"sets": ["all"], "vocab_size": 3},
            {},
            "dataset.json has no seq_len and num_puzzle_identifiers; each is a number above 0",
        ),
        (ABOUT | {"seq_len": "6"}, {}, "dataset.json has '6' as seq_len; it is a whole number"),
        (
            ABOUT | {"sets": ["some"]},
            {},
            " has no inputs of its set some: some__inputs.npy, or some/inputs.npy",
        ),
        (
            ABOUT,
            {"inputs": np.zeros((10, 5), int)},
            "all__inputs.npy holds int64 of shape (10, 5); it is of whole numbers, rows of 6, "
            "seq_len of dataset.json",
        ),
        (
            ABOUT,
            {"labels": np.zeros((9, 6), int)},
            " has 10 inputs and 9 labels in its set all; an example has both",
        ),
        (
            ABOUT,
            {"puzzle_indices": np.array([0, 2, 4, 5, 6, 7, 9])},
            " has puzzle_indices in its set all that do not divide 10 examples: they rise from 0 "
            "to 10",
        ),
        (
            ABOUT,
            {"group_indices": np.array([0, 3, 3, 6])},
            " has group_indices in its set all that do not divide 6 puzzles: they rise from 0 to 6",
        ),
        (
            ABOUT,
            {"puzzle_identifiers": np.arange(5)},
            " has 5 puzzle_identifiers in its set all, and 6 puzzles; each has one",
        ),
        (
            ABOUT,
            {"puzzle_identifiers": np.arange(6) * 2},
            " has puzzle_identifiers from 0 to 10 in its set all; there are 9, from 0 on",
        ),
        (
            ABOUT | {"vocab_size": 11},
            {"inputs": np.full((10, 6), 11)},
            " has 11 among its inputs; vocab_size of dataset.json is 11: ids are 0 to 10",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, about: Any, fields: dict, what: str):
    write(tmp_path / "train", about, all=arrays() | fields)
    with pytest.raises(UserError) as refused:
        Source(path=str(tmp_path), validation=None).rows(np.arange(2), None, 0)
    said = str(refused.value)
    assert said.startswith(f"{tmp_path}/train") and what in said.removeprefix(f"{tmp_path}/train")


def test_folders_that_are_not_there_are_refused(tmp_path: Path):
    write(tmp_path / "a/train", all=arrays())
    for path, what in (
        ("b", f"data.source.path is {tmp_path}/b, which is no folder; it is looked for from "),
        (
            "",
            f"data.source.path is {tmp_path}/, without a folder train; none of its folders has a ",
        ),
    ):
        with pytest.raises(UserError) as absent:
            len(Source(path=f"{tmp_path}/{path}"))
        assert str(absent.value).startswith(what)
    with pytest.raises(UserError) as refused:
        prepare(Data(source=Source(path=f"{tmp_path}/a")), Tokenizer())
    assert str(refused.value) == (
        f"data.source.validation is test, and {tmp_path}/a has no such folder; it has train, and "
        "data.source.validation=null holds out none"
    )
