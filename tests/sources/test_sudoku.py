"""Sudoku as a source of blocks: generated or from a file, split, augmented, shown, refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.data import Data, Prepared, prepare
from windlass.data.load import Loader
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.puzzles import sudoku
from windlass.sources.sudoku import Source

HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
EASY = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SMALL = Source(size=4, clues=9, count=600)


def prepared(source: Source, **how: Any) -> Prepared:
    return prepare(Data(source=source, **how), Tokenizer())


def whole(data: Prepared, name: str) -> dict[str, np.ndarray]:
    return data.split(name).batch(range(len(data.split(name))))


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join([*lines, ""]))
    return str(path)


def test_tokens_are_one_above_the_digits_and_targets_are_the_solution(tmp_path: Path):
    source = Source(path=write(tmp_path / "a.txt", HARD, EASY.replace(".", "0")))
    rows = source.rows(np.array([1, 0]), None, 0)
    assert {name: (x.dtype, x.shape[1:]) for name, x in rows.items()} == {
        name: (column.dtype, column.axes) for name, column in source.columns.items()
    }
    assert len(source) == 2 and source.vocab == 11
    for tokens, targets, line in zip(rows["tokens"], rows["targets"], (EASY, HARD), strict=True):
        assert "".join(".123456789"[token - 1] for token in tokens) == line
        assert (targets == tokens)[tokens > 1].all() and {*targets.tolist()} == {*range(2, 11)}


def test_files_that_are_held_out_are_splits_of_their_own(tmp_path: Path):
    one = write(tmp_path / "a.txt", EASY)
    source = Source(path=one, validation=write(tmp_path / "b.txt", HARD, EASY), test=one, limit=1)
    data = prepared(source)
    assert {name: len(rows) for name, rows in data.splits.items()} == {
        **{"train": 1, "validation": 2, "test": 1}
    }
    tokens = whole(data, "validation")["tokens"]
    assert [np.count_nonzero(row > 1) for row in tokens] == [21, 30]
    assert (whole(data, "test")["tokens"] == whole(data, "train")["tokens"]).all()
    with pytest.raises(ValueError) as refused:
        Data(source=source, validation=0.1)
    assert str(refused.value) == (
        "validation is 0.1, and data.source has validation rows of its own; leave one of them out"
    )


def test_an_epoch_is_another_symmetry_and_evaluation_none(tmp_path: Path):
    source = Source(path=write(tmp_path / "a.txt", HARD))
    numbers, epochs = np.zeros(50, int), np.arange(50)
    rows = source.rows(numbers, epochs, 7)
    assert len({*map(bytes, rows["tokens"])}) == 50
    found = sudoku.solve(rows["tokens"][:5] - 1)
    assert (found.solutions + 1 == rows["targets"][:5]).all() and (found.count == 1).all()
    again = source.rows(numbers[20:30], epochs[20:30], 7)
    assert all((again[name] == x[20:30]).all() for name, x in rows.items())
    assert (source.rows(numbers, epochs, 8)["tokens"] != rows["tokens"]).any()
    plain = source.rows(numbers[:1], None, 7)["tokens"]
    still = Source(path=source.path, augment=False)
    assert (still.rows(numbers, epochs, 7)["tokens"] == plain).all()


@pytest.mark.parametrize("size", [4, 9])
def test_training_reads_puzzles_with_some_of_their_blanks_filled_in(size: Any):
    source = Source(size=size, count=4, clues={4: 9, 9: 40}[size])
    easier = dataclasses.replace(source, reveal=0.5)
    numbers, epochs = np.arange(400) % 4, np.arange(400) // 4
    hard, easy = (one.rows(numbers, epochs, 7) for one in (source, easier))
    is_blank, is_left = hard["tokens"] == 1, easy["tokens"] == 1
    assert (is_blank | ~is_left).all() and (easy["targets"] == hard["targets"]).all()
    assert (easy["tokens"] == np.where(is_left, 1, easy["targets"])).all()
    revealed = (is_blank & ~is_left).sum(axis=1) / is_blank.sum(axis=1)
    assert revealed.min() < 0.05 and abs(revealed.mean() - 0.25) < 0.03
    plain = [one.rows(numbers[:4], None, 7)["tokens"] for one in (source, easier)]
    assert (plain[0] == plain[1]).all() and source.fingerprint() != easier.fingerprint()
    again = easier.rows(numbers[100:110], epochs[100:110], 7)
    assert (again["tokens"] == easy["tokens"][100:110]).all()


@pytest.mark.parametrize("size", [4, 9])
def test_answers_to_variants_of_a_puzzle_are_restored_to_its_own(size: Any):
    source, numbers = Source(size=size, count=6, clues={4: 9, 9: 40}[size]), np.arange(6)
    plain = source.rows(numbers, None, 0)
    for copy in range(8):
        rows = source.variant(numbers, copy)
        found = sudoku.solve(rows["tokens"] - 1)
        assert (found.solutions + 1 == rows["targets"]).all() and (found.count == 1).all()
        for name in ("tokens", "targets"):
            assert copy == 0 or (rows[name] != plain[name]).any(axis=1).all()
            assert (source.restored(numbers, copy, rows[name]) == plain[name]).all()
    assert source.variants == {4: 3072, 9: 1_218_998_108_160}[size]
    wild = np.full((6, size**2), 2 + size)  # no digit
    assert (source.restored(numbers, 3, wild) == 1).all()


def test_small_grids_are_held_out_whole_and_never_met_in_training():
    data = prepared(SMALL, validation=0.3)
    train, held_out = (whole(data, name)["targets"] for name in ("train", "validation"))
    ours, theirs = ({*map(bytes, grids)} for grids in (train, held_out))
    assert not ours & theirs and len(ours | theirs) == 288 and 60 < len(theirs) < 110
    loader = Loader(data.split("train"), 64, seed=1, shuffle=True)
    met = [loader.batch(step) for step in range(30)]
    assert {bytes(row) for batch in met for row in batch["targets"]} <= ours
    # Other clues of the same grids, in every epoch.
    assert len({bytes(row) for batch in met for row in batch["tokens"]}) > 1900
    assert all((np.count_nonzero(batch["tokens"] > 1, axis=1) == 9).all() for batch in met)


def test_generated_puzzles_follow_from_seed_and_number(monkeypatch: pytest.MonkeyPatch):
    numbers = np.arange(3)
    few, more = (Source(count=n, clues=40).rows(numbers, None, 0)["tokens"] for n in (3, 4))
    assert (few == more).all() and (np.count_nonzero(few - 1, axis=1) == 40).all()
    others = Source(count=3, clues=40, seed=1).rows(numbers, None, 0)["tokens"]
    assert (others != few).any(axis=1).all()
    rated = Source(count=3, guesses=1).rows(numbers, None, 0)["tokens"] - 1
    found = sudoku.solve(rated)
    assert (found.guesses >= 1).all() and (found.count == 1).all()
    monkeypatch.setattr("windlass.sources.sudoku.TRIES", 1)
    with pytest.raises(UserError) as refused:
        Source(count=2, clues=60, guesses=1000).rows(numbers[:2], None, 0)
    assert str(refused.value) == (
        "data.source.guesses is 1000, and 2 of 2 puzzles did not need so many in 1 tries; fewer "
        "would do"
    )


def test_the_fingerprint_is_of_the_puzzles_and_not_of_their_place(tmp_path: Path):
    one, same, other = (
        Source(path=write(tmp_path / name, line)).fingerprint()
        for name, line in (("a.txt", HARD), ("b.txt", HARD), ("c.txt", EASY))
    )
    assert one == same != other
    assert Source(seed=1).fingerprint() != Source().fingerprint() != SMALL.fingerprint()


def test_a_puzzle_is_shown_beside_its_solution():
    row = {name: x[0] for name, x in SMALL.rows(np.array([0]), None, 0).items()}
    rated, *lines = SMALL.shown(row).splitlines()
    assert rated == "9 clues, 0 guesses" and len(lines) == 7
    assert lines[0] == lines[3] == lines[6] == "+-----+-----+   +-----+-----+"
    digits = "".join(lines[row][16 + at] for row in (1, 2, 4, 5) for at in (2, 4, 8, 10))
    assert digits == "".join(str(token - 1) for token in row["targets"])


@pytest.mark.parametrize(
    ("lines", "size", "what"),
    [
        ([HARD, HARD[:80]], 9, "line 2 has 80 characters; a puzzle has 81, row by row"),
        (
            ["1" + "." * 15],
            9,
            "line 1 has 16 characters; a puzzle has 81, row by row: data.source.size=4 would do",
        ),
        (["5" + "." * 15], 4, "line 1 is 5...............; a cell is 1 to 4, and . or 0 where it "),
        ([HARD, "88" + HARD[2:]], 9, "line 2 has no solution; a puzzle has exactly one"),
        ([HARD, EASY, "." * 81], 9, "line 3 has several solutions; a puzzle has exactly one"),
    ],
)
def test_a_line_that_is_no_puzzle_is_refused_by_its_number(
    tmp_path: Path, lines: list[str], size: Any, what: str
):
    path = write(tmp_path / "a.txt", *lines)
    with pytest.raises(UserError) as refused:
        Source(path=path, size=size).rows(np.array([0]), None, 0)
    assert str(refused.value).startswith(f"{path} {what}")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (dict(test="a.txt"), "test is a.txt; it goes with path"),
        (dict(count=0), "count is 0; there is at least 1 puzzle"),
        (dict(guesses=-1), "guesses is -1; it is a count, and for puzzles of 9 rows"),
        (dict(guesses=1, size=4), "guesses is 1; it is a count, and for puzzles of 9 rows"),
        (dict(reveal=1.0), "reveal is 1.0; it is a share of the blanks, 0 or more, below 1"),
        (dict(reveal=0.1, augment=False), "reveal is 0.1; it goes with augment"),
        (
            dict(clues=3, size=4),
            "clues is 3; a puzzle of 4 rows can have 6 to 15, and without the key as few as its "
            "grid allows",
        ),
    ],
)
def test_keys_that_make_no_puzzles_are_refused(fields: dict, what: str):
    with pytest.raises(ValueError) as refused:
        Source(**fields)
    assert str(refused.value) == what
