"""Documents in rows are counted as the rows are drawn, for every device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data
from windlass.data.load import Loader
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.tokenizer import Tokenizer
from windlass.run.batches import Batches
from windlass.sources import jsonl
from windlass.training import documents
from windlass.training.documents import Drawing, documents_per_row

TEXTS = ["a" * n + chr(98 + n % 20) for n in (3, 40, 1, 0, 16, 15, 14, 33, 7, 2, 9, 9, 9, 31, 64)]


def prepared(folder: Path, copies: int = 1, **how: Any) -> Sequences:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS * copies))
    data = Data(source=jsonl.Source(path=str(file)), cache=str(folder / "cache"), **how)
    rows = tokenized(data, Tokenizer(kind="byte"), console=Console(quiet=True)).split("train")
    assert isinstance(rows, Sequences)
    return rows


def count(ids: np.ndarray) -> int:
    return sum(len(np.unique(row[row >= 0])) for row in ids)


@pytest.mark.parametrize("length", [4, 8, 16, 65])
@pytest.mark.parametrize("packing", ["documents", "none"])
def test_documents_of_a_row_are_counted_without_its_padding(length, packing, tmp_path):
    rows = prepared(tmp_path, length=length, packing=packing)
    counted = [count(rows[number]["document"][None]) for number in range(len(rows))]
    assert documents_per_row(rows) == (max(counted), pytest.approx(np.mean(counted)), None)
    assert documents_per_row(Mixture([rows, rows], [1, 1])) == documents_per_row(rows)


@pytest.mark.parametrize("is_mixture", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batches", [(2, 2, 1), (1, 1, 3), (2, 2, 2), (1, 3, 1)])
def test_documents_that_a_device_has_at_once_are_those_of_the_rows_it_gets(
    is_mixture, shuffle, batches, tmp_path, monkeypatch
):
    monkeypatch.setattr(documents, "TOGETHER", 16)
    rows: Any = prepared(tmp_path, copies=5, length=16)
    if is_mixture:
        rows = Mixture([rows, rows], [0.7, 0.3])
    drawing = Drawing(Batches(*batches), 29, 3, shuffle)
    loader = Loader(rows, drawing.batches.rows, drawing.seed, shuffle)
    most = 0
    for step in range(drawing.steps):
        for share in np.split(loader.batch(step)["document"], drawing.batches.shards):
            for first in range(drawing.batches.accumulation):
                most = max(most, count(share[first :: drawing.batches.accumulation]))
    known = documents_per_row(rows, drawing)
    assert known is not None and known.drawn == (drawing.batches.per_device, most)
    assert known.at_most(drawing.batches.per_device) == most
    assert known.at_most(7) == 7 * known.most


def test_rows_of_a_long_run_are_not_drawn_before_it(tmp_path):
    rows = prepared(tmp_path, length=16)
    long = Drawing(Batches(1, 1, 1), documents.DRAWN + 1, 0, True)
    assert documents_per_row(rows, long) == documents_per_row(rows)
