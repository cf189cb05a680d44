"""Documents that belong together: they stay in one row, and columns beside rows follow them."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from windlass.columns import Column, StoredColumn, sized
from windlass.data import Tokenized
from windlass.data.pack import COLUMNS, Packing, Sequences, sequences

LENGTH = 16
# Of each pair the bytes of both texts; with a beginning and an end, one more is to be read of each.
SIZES = [(3, 4), (9, 8), (2, 6), (1, 1), (0, 3), (7, 7), (5, 2)]
TOO_LONG, LACKING = 1, 4


@pytest.fixture
def prepared(documents) -> Tokenized:
    return documents(["x" * size for pair in SIZES for size in pair])


def of(prepared: Tokenized, console: Console, packing: Packing = "documents") -> Sequences:
    corpus = prepared.corpora[0]
    every = np.arange(corpus.documents)
    return sequences(
        corpus,
        every,
        length=LENGTH,
        stride=LENGTH,
        packing=packing,
        is_once=False,
        console=console,
        together=2,
    )


def test_each_pair_is_whole_in_one_row_its_first_document_of_an_even_number(prepared, console):
    found = of(prepared, console)
    pieces = [found.pieces(number) for number in range(len(found))]
    for row in pieces:
        assert all(piece.start == 0 for piece in row)
        numbers = [piece.document for piece in row]
        assert all(first % 2 == 0 and second == first + 1 for first, second in pairs(numbers))
    held = sorted(piece.document // 2 for row in pieces for piece in row)
    whole = [number for number in range(len(SIZES)) if number not in (TOO_LONG, LACKING)]
    assert held == sorted([*whole, *whole])
    assert len(found) == 4  # of 16 tokens, 10 + 4, 9 and 9


def pairs(numbers: list[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_without_packing_a_row_is_a_pair(prepared, console):
    found = of(prepared, console, packing="none")
    assert [len(found.pieces(number)) for number in range(len(found))] == [2] * 5


def test_a_column_beside_the_rows_is_read_with_them_in_another_process_too(
    prepared, console, tmp_path: Path
):
    plain = of(prepared, console)
    file = tmp_path / "reference.npy"
    column = Column(np.float16, (LENGTH, 2), padding=-1)
    beside = plain.with_beside({"reference": StoredColumn(column, file)})  # which is not there yet
    assert plain.columns == sized(COLUMNS, LENGTH)
    assert beside.columns == {**plain.columns, "reference": column}
    values = np.arange(len(plain) * LENGTH * 2, dtype=np.float16).reshape(len(plain), LENGTH, 2)
    np.save(file, values)
    for rows_of in (beside, pickle.loads(pickle.dumps(beside))):
        found = rows_of.batch([2, -1, 0])
        np.testing.assert_array_equal(found["reference"], [values[2], 0 * values[0] - 1, values[0]])
        for name, one in beside.columns.items():
            assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape(3))
    for shard, first in enumerate(range(0, len(plain), 2)):
        (tmp_path / f"{shard:05d}").mkdir()
        np.save(tmp_path / f"{shard:05d}/reference.npy", values[first : first + 2])
    file.unlink()
    sharded = plain.with_beside({"reference": StoredColumn(column, file, shard=2)})
    found = sharded.batch([3, 0, -1, 2])["reference"]
    np.testing.assert_array_equal(found, [values[3], values[0], 0 * values[0] - 1, values[2]])
    assert beside.fingerprint == plain.fingerprint
    assert beside.fingerprint != of(prepared, console, packing="none").fingerprint
