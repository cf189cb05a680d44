"""What attention is told of the documents in rows is so of every row that a run reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data
from windlass.data.mix import Mixture
from windlass.data.split import Split
from windlass.data.tokenizer import Tokenizer
from windlass.sources import jsonl
from windlass.training.documents import documents_in_rows

TEXTS = ["a" * n + chr(98 + n % 20) for n in (3, 40, 1, 0, 16, 15, 14, 33, 7, 2, 9, 9, 9, 31, 64)]


def prepared(folder: Path, **how: Any) -> Split:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    data = Data(source=jsonl.Source(path=str(file)), cache=str(folder / "cache"), **how)
    return tokenized(data, Tokenizer(kind="byte"), console=Console(quiet=True)).split("train")


@pytest.mark.parametrize(("packing", "expected"), [("documents", "several"), ("none", "one")])
@pytest.mark.parametrize("length", [8, 16, 65])
def test_documents_of_a_row_are_those_that_its_column_tells_apart(
    length, packing, expected, tmp_path
):
    rows = prepared(tmp_path, length=length, packing=packing)
    most = max(rows.batch([number])["document"].max() for number in range(len(rows)))
    assert (most > 0) == (expected == "several")
    assert documents_in_rows(rows) == expected
    assert documents_in_rows(Mixture([rows, rows], [1, 1])) == expected


def test_a_mixture_has_several_documents_in_rows_where_one_of_its_parts_has(tmp_path):
    one, several = (prepared(tmp_path, length=16, packing=name) for name in ("none", "documents"))
    assert documents_in_rows(Mixture([one, several], [1, 1])) == "several"
