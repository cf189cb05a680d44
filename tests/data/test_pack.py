import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data, Tokenized
from windlass.data.mix import Mixture
from windlass.data.pack import COLUMNS, Sequences, best_fit
from windlass.data.tokenizer import Tokenizer
from windlass.sources import stories

Documents = Callable[..., Tokenized]
TEXTS = ["a" * n + chr(98 + n % 20) for n in (3, 40, 1, 0, 16, 15, 14, 33, 7, 2, 9, 9, 9, 31, 64)]


def examples(rows: Sequences | Mixture) -> Counter:
    """What is read, what is to be predicted and where, of every place that is trained on."""
    found = Counter()
    for number in range(len(rows)):
        row = rows[number]
        names = ("tokens", "targets", "position")
        kept = [row[name][row["weight"] > 0].tolist() for name in names]
        found.update(zip(*kept, strict=True))
    return found


def naive(sizes: list[int], room: int) -> list[int]:
    """What is left of every row when pieces are placed one at a time."""
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(space, row) for row, space in enumerate(free) if space >= size]
        if fitting:
            free[min(fitting)[1]] -= size
        else:
            free.append(room - size)
    return free


def test_every_token_but_the_first_of_a_document_is_a_target_once(documents: Documents):
    prepared = documents(TEXTS)
    rows, corpus = prepared.split("train"), prepared.corpora[0]
    seen = np.zeros(len(corpus.tokens), int)
    for number in range(len(rows)):
        row = rows[number]
        for place, piece in enumerate(rows.pieces(number)):
            begin = corpus.offsets[piece.document]
            here = row["document"] == place
            expected = corpus.tokens[begin + piece.start : begin + piece.stop + 1]
            assert row["tokens"][here].tolist() == expected[:-1].tolist()
            assert row["targets"][here].tolist() == expected[1:].tolist()
            assert row["position"][here].tolist() == list(range(piece.stop - piece.start))
            seen[begin + piece.start + 1 : begin + piece.stop + 1] += 1
    firsts = corpus.offsets[:-1]
    assert (seen[firsts] == 0).all()
    assert (np.delete(seen, firsts) == 1).all()
    assert rows.tokens == seen.sum() == prepared.parts("train")[0].counts.sum()


def test_packed_and_unpacked_rows_hold_the_same_examples(documents: Documents):
    packed, single = (
        documents(TEXTS, packing=packing).split("train") for packing in ("documents", "none")
    )
    assert examples(packed) == examples(single)
    assert len(packed) < len(single)
    assert all(len(single.pieces(number)) == 1 for number in range(len(single)))


def test_padding_is_known_by_position_although_its_token_ends_documents(documents: Documents):
    prepared = documents(["ab", "cde"], packing="none", length=6)
    row = prepared.split("train")[0]
    assert row["tokens"].tolist() == [256, 97, 98, 256, 256, 256]
    assert row["targets"].tolist() == [97, 98, 256, 256, 256, 256]
    assert row["weight"].tolist() == [1, 1, 1, 0, 0, 0]
    assert row["position"].tolist() == [0, 1, 2, 0, 0, 0]
    assert row["document"].tolist() == [0, 0, 0, -1, -1, -1]
    assert {name: x.dtype for name, x in row.items()} == {
        name: column.dtype for name, column in COLUMNS.items()
    }


def test_a_long_document_is_cut_without_losing_a_target(documents: Documents):
    rows = documents(["abcdefg"], length=3).split("train")
    assert [rows.pieces(number)[0][1:] for number in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert [rows[number]["targets"].tolist() for number in range(3)] == [
        [97, 98, 99],
        [100, 101, 102],
        [103, 256, 256],
    ]


def test_documents_without_text_are_in_no_row(documents: Documents):
    rows = documents(["", "ab", "", "cd", ""]).split("train")
    assert [piece.document for piece in rows.pieces(0)] == [1, 3]
    assert rows.documents == 2


def test_a_batch_is_its_rows(documents: Documents):
    rows = documents(TEXTS).split("train")
    numbers = [3, 0, len(rows) - 1, 3]
    batch = rows.batch(numbers)
    for name, column in batch.items():
        assert (column == np.stack([rows[number][name] for number in numbers])).all()


def test_the_number_minus_one_is_a_row_of_nothing(documents: Documents):
    rows = documents(TEXTS).split("train")
    batch = rows.batch([-1, 0, -1])
    for name, column in batch.items():
        assert (column[1] == rows[0][name]).all()
    assert (batch["document"][[0, 2]] == -1).all()
    assert (batch["weight"][[0, 2]] == 0).all()
    assert rows.batch([-1])["weight"].sum() == 0


def test_a_row_that_is_not_there_is_an_error(documents: Documents):
    rows = documents(["ab"]).split("train")
    for number in (1, -1):
        with pytest.raises(IndexError):
            rows[number]


@pytest.mark.parametrize("seed", range(5))
def test_packing_is_the_best_fit_of_the_longest_first(seed: int):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 33, generator.integers(1, 300))
    row = best_fit(sizes, 32)
    filled = np.bincount(row, weights=sizes)
    assert sorted(32 - filled) == sorted(naive(sizes.tolist(), 32))


def test_packing_takes_any_one_size():
    for size, count in itertools.product(range(1, 9), range(5)):
        row = best_fit(np.full(count, size), 8)
        assert len(set(row.tolist())) == -(-count // (8 // size))


def test_rows_are_in_the_order_of_their_earliest_documents(documents: Documents):
    rows = documents(TEXTS).split("train")
    pieces = [rows.pieces(number) for number in range(len(rows))]
    assert [row[0] for row in pieces] == sorted(row[0] for row in pieces)
    assert all(row == sorted(row) for row in pieces)


def test_packing_of_stories_is_efficient(tmp_path: Path, console: Console):
    for length, least in ((256, 0.9), (512, 0.93)):
        data = Data(source=stories.Source(count=1000), length=length, cache=str(tmp_path))
        rows = tokenized(data, Tokenizer(kind="bpe", vocab=1024), console=console).split("train")
        assert rows.efficiency > least
        assert rows.efficiency == rows.batch(range(len(rows)))["weight"].mean(dtype=np.float64)
