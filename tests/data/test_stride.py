from collections.abc import Callable

import numpy as np
import pytest

from windlass.data import Tokenized
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences

Documents = Callable[..., Tokenized]
LONG = "abcdefghijklmnopqrstuvwxyz"  # and a beginning and an end: 28 tokens, 27 to predict
TEXTS = [LONG, "short", LONG[:7], LONG[:8], LONG[::-1] * 2]


def pieces(rows: Sequences | Mixture) -> list[tuple[int, int]]:
    found = [piece for number in range(len(rows)) for piece in rows.pieces(number)]
    return [(piece.start, piece.stop) for piece in sorted(found)]


def test_rows_of_a_long_document_begin_a_stride_apart(documents: Documents):
    rows = documents([LONG], length=8, stride=5).split("train")
    assert isinstance(rows, Sequences)
    assert pieces(rows) == [(0, 8), (5, 13), (10, 18), (15, 23), (20, 27)]
    whole = documents([LONG], length=8, stride=8).split("train")
    assert isinstance(whole, Sequences)
    assert pieces(whole) == [(0, 8), (8, 16), (16, 24), (24, 27)]
    alike = documents([LONG], length=8).split("train")
    assert isinstance(alike, Sequences) and pieces(alike) == pieces(whole)


@pytest.mark.parametrize("readable", range(1, 30))
def test_no_row_holds_only_what_the_one_before_it_holds(documents: Documents, readable: int):
    rows = documents(["x" * (readable - 1)] if readable > 1 else ["y"], length=8, stride=3)
    ends = [stop for _, stop in pieces(rows.split("train"))]
    assert ends == sorted(set(ends))


def test_training_counts_a_token_in_every_row_that_has_it(documents: Documents):
    rows = documents([LONG], length=8, stride=5).split("train")
    columns = rows.batch(range(len(rows)))
    assert ((columns["weight"] == 1) == (columns["document"] >= 0)).all()
    assert rows.tokens == 8 * 4 + 7


@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_evaluation_counts_every_token_once_where_the_most_stands_in_front(
    documents: Documents, stride: int, packing: str
):
    # Every other document by chance of its number, so all of them twice over.
    prepared = documents(TEXTS * 8, length=8, stride=stride, packing=packing, validation=0.4)
    rows, corpus = prepared.split("validation"), prepared.corpora[0]
    assert isinstance(rows, Sequences)
    context: dict[int, list[int]] = {}
    for number in range(len(rows)):
        row = rows[number]
        for place, piece in enumerate(rows.pieces(number)):
            here = row["document"] == place
            begin = int(corpus.offsets[piece.document]) + piece.start + 1
            for position, weight in zip(row["position"][here], row["weight"][here], strict=True):
                if weight:
                    context.setdefault(begin + int(position), []).append(int(position))
    held = {piece.document for n in range(len(rows)) for piece in rows.pieces(n)}
    expected: dict[int, list[int]] = {}
    for document in held:
        first, stop = corpus.offsets[document : document + 2].tolist()
        for target in range(first + 1, stop):
            # The first window that has it is the one in which it stands last.
            ahead = target - first - 1
            start = max(0, -(-(ahead - 7) // stride)) * stride
            expected[target] = [ahead - start]
    assert context == expected
    assert rows.tokens == len(expected)
    assert rows.tokens == rows.batch(range(len(rows)))["weight"].sum()


def test_a_stride_is_another_arrangement_of_the_same_corpus(documents: Documents):
    one, other = (documents(TEXTS, length=8, stride=stride) for stride in (8, 4))
    assert one.fingerprint == other.fingerprint
    assert other.split("train").tokens > one.split("train").tokens
    assert np.array_equal(one.corpora[0].tokens, other.corpora[0].tokens)
