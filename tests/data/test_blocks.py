"""Blocks: rows by number, past tokenizer, format, checks and packing."""

import dataclasses
import io
import pickle
from itertools import islice

import numpy as np
import pytest
from rich.console import Console

from tests.strangers.sources import grid
from windlass.columns import Column
from windlass.data import Data, Prepared, prepare, rows_of_an_epoch
from windlass.data.blocks import BlockRows
from windlass.data.load import Loader, evaluation_batches
from windlass.data.mix import Mixture
from windlass.data.show import show
from windlass.data.split import split
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources import stories

from .test_load import same, whole

GRID = grid.Source(count=40, seed=3)


def prepared(**how) -> Prepared:
    return prepare(Data(**{"source": GRID, **how}), Tokenizer())


def test_columns_are_as_the_source_declares_them_on_the_device_too():
    data = prepared()
    assert data.columns == data.data.columns == GRID.columns
    (batch,) = islice(Loader(data.split("train"), 8, 0, True).iterate(0, whole), 1)
    found = {name: Column(x.dtype, x.shape[1:]) for name, x in batch.items()}
    assert {name: str(column) for name, column in found.items()} == {
        "tokens": "int32[rows, 16]",
        "targets": "int32[rows, 16]",
        "weight": "float32[rows, 16]",
        "position": "int32[rows, 16]",
        "document": "int32[rows, 16]",
        "puzzle": "int32[rows]",
        "candidates": "uint8[rows, 16, 4]",
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_is_the_same_from_any_start_and_from_any_worker(workers: int, mixed: bool):
    parts = (grid.Source(count=30, weight=2.0), grid.Source(count=7, seed=1))
    rows = prepared(**({"source": None, "mixture": parts} if mixed else {})).split("train")
    plain = Loader(rows, 6, seed=3, shuffle=True, prefetch=0)
    expected = [plain.batch(step) for step in range(14)]
    for start in (5,) if workers else range(14):
        loader = Loader(rows, 6, seed=3, shuffle=True, workers=workers, prefetch=2)
        batches = loader.iterate(start, whole)
        for step, batch in enumerate(islice(batches, 14 - start), start=start):
            assert same(batch, expected[step])


def test_epochs_differ_by_the_augmentation_alone():
    rows = prepared().split("train")
    first, second = (rows.batch(range(40), np.full(40, epoch), 5) for epoch in (0, 1))
    for name in ("weight", "position", "document", "puzzle"):
        assert (first[name] == second[name]).all()
    assert (first["targets"] != second["targets"]).any(axis=1).mean() > 0.8
    for one, other in zip(first["targets"], second["targets"], strict=True):
        assert len({*zip(one.tolist(), other.tolist(), strict=True)}) == 4  # one to one
    other_run = rows.batch(range(40), np.zeros(40, int), 6)
    assert (first["targets"] != other_run["targets"]).any()


def test_a_row_depends_on_its_own_number_and_epoch_and_not_on_the_batch_it_is_in():
    rows = prepared().split("train")
    epochs = np.arange(40) % 3
    together = rows.batch(range(40), epochs, 1)
    for number in (0, 7, 39):
        alone = rows.batch([number], epochs[[number]], 1)
        assert same(alone, {name: x[[number]] for name, x in together.items()})


def test_an_epoch_has_every_row_once_and_the_order_of_packed_sequences():
    loader = Loader(prepared().split("train"), 8, seed=0, shuffle=True)
    seen = np.concatenate([loader.batch(step)["puzzle"] for step in range(5)])
    assert sorted(seen.tolist()) == list(range(40))
    later = np.concatenate([loader.batch(step)["puzzle"] for step in range(5, 10)])
    assert sorted(later.tolist()) == list(range(40)) and later.tolist() != seen.tolist()


def test_evaluation_is_in_no_epoch_and_ends_with_padding():
    data = prepared(validation=0.4)
    rows = data.split("validation")
    first, again = ([*evaluation_batches(rows, 8, whole)] for _ in range(2))
    assert all(same(one, other) for one, other in zip(first, again, strict=True))
    held_out = split(40, validation=0.4, test=0.0, seed=0)["validation"]
    puzzles = np.concatenate([one["puzzle"] for one in first])
    count = len(held_out)
    assert count % 8 and puzzles[:count].tolist() == held_out.tolist()
    assert (puzzles[count:] == -1).all()
    assert (first[-1]["document"][count % 8 :] == -1).all()
    assert not np.asarray(first[-1]["candidates"][count % 8 :]).any()
    unaugmented = dataclasses.replace(GRID, augment=False).rows(held_out, np.ones(count), 9)
    assert (np.concatenate([one["tokens"] for one in first])[:count] == unaugmented["tokens"]).all()


def test_splits_are_by_row_number_and_disjoint():
    data = prepared(validation=0.3, test=0.2)
    found = [data.split(name).batch(range(len(data.split(name))))["puzzle"] for name in data.splits]
    assert sorted(np.concatenate(found).tolist()) == list(range(40))
    with pytest.raises(UserError, match="^there are no test rows; data.test=0.05 holds out one in"):
        prepared().split("test")


def test_a_worker_is_sent_no_rows():
    rows = BlockRows(grid.Source(count=10**6), "train", 0.1, 0.0, 0)
    assert len(rows) > 8e5 and len(pickle.dumps(rows)) < 1000
    again = pickle.loads(pickle.dumps(rows))
    assert same(again.batch([5]), rows.batch([5]))


def test_a_mixture_has_the_rows_of_each_part_in_its_own_epoch():
    parts = (grid.Source(count=30, weight=3.0), grid.Source(count=5, weight=1.0, seed=1))
    rows = prepared(source=None, mixture=parts).split("train")
    assert isinstance(rows, Mixture)
    numbers, epochs, _ = rows.drawn(np.arange(400), 0, True)
    assert epochs is not None
    of_second = numbers >= 30
    assert of_second.mean() == pytest.approx(0.25)
    assert epochs[of_second].max() == 19 and epochs[~of_second].max() == 9


def test_the_length_follows_from_the_columns_and_no_row_is_read(monkeypatch):
    monkeypatch.setattr(grid.Source, "rows", None)
    assert Data(source=GRID).length == 16
    assert Data(source=GRID, length=16).columns == GRID.columns
    assert rows_of_an_epoch(Data(source=GRID, validation=0.25), Tokenizer()) == 31


def test_the_fingerprint_is_of_the_rows_and_their_columns():
    sources = (grid.Source(seed=seed) for seed in (0, 0, 1))
    one, again, other = (prepared(source=source).fingerprint for source in sources)
    assert one == again != other
    assert prepared(source=grid.Source(augment=False)).fingerprint != one


def test_rows_are_shown_as_their_source_prints_them():
    console = Console(file=io.StringIO(), width=80)
    data = prepared(validation=0.25)
    show(data, data.split("train"), console, 1)
    tokens = data.split("train").batch([0])["tokens"][0].reshape(4, 4).tolist()
    lines = [" ".join(str(x or ".") for x in row) for row in tokens]
    printed = console.file.getvalue().splitlines()  # pyright: ignore
    assert [line.rstrip() for line in printed[:6]] == ["row 0", "puzzle 0", *lines]
    assert "│ validation │    9 │" in printed


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (
            {"length": 12},
            "data.length is 12, and the rows of data.source are 16 long; data.length=16 would do, "
            "or leave it out",
        ),
        (
            {"source": None, "mixture": (GRID, grid.Source(size=3))},
            "data.mixture.1 has rows of tokens int32[rows, 9], targets int32[rows, 9], weight "
            "float32[rows, 9], position int32[rows, 9], document int32[rows, 9], puzzle "
            "int32[rows], candidates uint8[rows, 9, 3], and data.mixture.0 of tokens "
            "int32[rows, 16], targets int32[rows, 16], weight float32[rows, 16], position "
            "int32[rows, 16], document int32[rows, 16], puzzle int32[rows], candidates "
            "uint8[rows, 16, 4]; the parts of a mixture have equal columns",
        ),
        (
            {"validation": 0.01},
            "data.validation is 0.01, and none of the 40 rows of data.source fell into that share; "
            "take a larger one",
        ),
    ],
)
def test_what_does_not_go_with_blocks_is_refused(how: dict, what: str):
    with pytest.raises(UserError) as refused:
        prepared(**how)
    assert str(refused.value) == what


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (
            {"stride": 8, "packing": "none"},
            [
                "stride is 8; it is for documents, and rows of blocks stay as they are",
                "packing is none; it is for documents, and rows of blocks stay as they are",
            ],
        ),
        (
            {"source": None, "mixture": (GRID, stories.Source())},
            ["mixture.1 has text, and another part has blocks; a mixture is of one or the other"],
        ),
    ],
)
def test_keys_of_documents_are_refused(how: dict, what: list[str]):
    with pytest.raises(ValueError) as refused:
        Data(**{"source": GRID, **how})
    assert [*refused.value.args] == what


def test_a_vocabulary_cannot_be_learned_from_blocks():
    with pytest.raises(UserError) as refused:
        prepare(Data(source=GRID), Tokenizer(kind="bpe", vocab=300))
    assert str(refused.value) == (
        "tokenizer.kind is bpe, which is learned from text, and data.source has blocks; "
        "tokenizer.kind=file or hub names the vocabulary that their tokens are of, and without a "
        "tokenizer they are trained on as well"
    )


def test_a_source_that_gives_other_columns_than_it_declares_is_refused(monkeypatch):
    rows = prepared().split("train")
    wrong = {"tokens": np.zeros((2, 16), np.int64)}
    monkeypatch.setattr(grid.Source, "rows", lambda self, *_: wrong)
    rows.columns.clear()
    rows.columns["tokens"] = Column(np.int32, (16,))
    with pytest.raises(UserError) as refused:
        rows.batch([0, 1])
    assert str(refused.value) == (
        "data.source.kind is grid, which declares tokens int32[rows, 16]; 2 of its rows came as "
        "tokens int64[rows, 16]"
    )


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UserError) as refused:
        Loader(prepared().split("train"), 64, 0, True)
    assert str(refused.value) == (
        "train.batch is 64 and there are 40 rows to train on; a batch of 40 or more rows would do"
    )
