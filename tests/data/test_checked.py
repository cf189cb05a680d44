"""Checks of rows where rows are tokenised: what is left out, told, kept with the tokens."""

import json
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.prepared import tokenized
from windlass.config import read
from windlass.data import Data, Tokenized, prepare
from windlass.data.checks import Checks
from windlass.data.show import facts
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.sources import jsonl

TEXTS = ["a first text", "a second text", "A first text!", "", "a first text", "the last text"]


def prepared(tmp_path: Path, checks: dict[str, Any] | None, **more: Any) -> Tokenized:
    file = tmp_path / "rows.jsonl"
    if not file.exists():
        rows = [{"text": text, "level": "low" if i else "high"} for i, text in enumerate(TEXTS)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(file)}
    data = {"source": source, "length": 16, "checks": checks, "cache": str(tmp_path / "cache")}
    return tokenized(read(Data, data | more), Tokenizer(), console=Console(file=StringIO()))


def documents(found: Tokenized) -> list[str]:
    corpus = found.corpora[0]
    bounds = zip(corpus.offsets, corpus.offsets[1:], strict=False)
    return [corpus.vocabulary.decode(corpus.tokens[begin:end]) for begin, end in bounds]


def test_text_is_not_checked_unless_it_is_asked_for(tmp_path):
    found = prepared(tmp_path, None)
    assert documents(found) == TEXTS
    assert found.corpora[0].checked is None
    assert list(facts(found)) == []


def test_dropped_rows_have_no_tokens_and_the_others_keep_their_numbers(tmp_path):
    found = prepared(tmp_path, {"duplicates": "drop", "alike": "drop"})
    assert documents(found) == ["a first text", "a second text", "", "", "", "the last text"]
    file = tmp_path / "rows.jsonl"
    assert list(facts(found)) == [
        ("examples", "6 read, 3 kept"),
        (
            "checks",
            f"1 near-duplicate example dropped, the first {file} line 3: nearly the same as {file} "
            "line 1",
        ),
        ("checks", f"1 empty example dropped, the first {file} line 4: it has no text"),
        (
            "checks",
            f"1 duplicate example dropped, the first {file} line 5: the same as {file} line 1",
        ),
        ("longest", "15 tokens, with 41 in all to train on"),
    ]
    kept = "a first text" + "a second text" + "the last text"
    counts = Counter(kept.encode()) + Counter({256: 3})  # and the ends
    share = np.array([*counts.values()]) / counts.total()
    assert found.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())


def test_rows_from_which_others_were_dropped_are_other_data_than_those_alone(tmp_path):
    how = {"format": {"kind": "sections", "sections": [{"heading": "#", "column": "text"}]}}
    first = prepared(tmp_path, {"offending": "drop"}, **how)
    assert first.corpora[0].owner is not None
    assert first.corpora[0].owner.tolist() == [0, 1, 2, 4, 5]
    file = tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3] + lines[4:]))
    # Which rows are held out follows from their numbers, and these are others now.
    second = prepared(tmp_path, {"offending": "drop"}, **how)
    assert documents(second) == documents(first)
    assert second.corpora[0].owner is None
    assert second.fingerprint != first.fingerprint
    assert next(facts(second)) == ("examples", "5 read, 5 kept")


def test_rows_longer_than_a_row_are_told_with_what_becomes_of_them(tmp_path):
    found = prepared(tmp_path, {}, length=13, longer="drop")
    assert list(facts(found))[-1] == (
        "longest",
        "15 tokens, with 26 in all to train on; 3 longer than data.length (13) are dropped",
    )


def test_other_checks_are_not_taken_from_the_cache_and_the_same_ones_are(tmp_path):
    first = prepared(tmp_path, {"duplicates": "drop"})
    again = prepared(tmp_path, {"duplicates": "drop"})
    assert again.corpora[0].folder == first.corpora[0].folder
    assert again.corpora[0].checked == first.corpora[0].checked
    other = prepared(tmp_path, {"duplicates": "warn"})
    assert other.fingerprint != first.fingerprint
    with pytest.raises(UserError) as refused:
        prepared(tmp_path, {"allowed": {"level": ["low"]}})
    assert str(refused.value) == (
        "1 of 6 examples of data.source cannot be trained on:\n"
        "  allowed level: 1 example\n"
        f"    {tmp_path / 'rows.jsonl'} line 1: level is high; it can be low\n"
        "data.checks.offending=drop leaves them out"
    )


def test_bad_rows_are_counted_and_the_first_of_each_kind_is_named(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {n}"}) for n in range(30)]
    for number in (3, 8, 20):
        lines[number] = "{" + "x" * number
    lines[12], lines[15], lines[25] = '{"text": 3}', "[]", '{"txt": "a"}'
    file.write_text("\n".join(lines))
    source = jsonl.Source(path=str(file))
    how: dict[str, Any] = {"length": 16, "cache": str(tmp_path / "cache")}
    expected = (
        "6 of 30 examples of data.source cannot be trained on:\n"
        "  format: 6 examples\n"
        f"    {file} line 4 is not JSON (Expecting property name enclosed in double quotes at "
        "column 2); one JSON object to a line is expected\n"
        f"    {file} line 13 has a number in column text; text is expected\n"
        f"    {file} line 16 is an array; one JSON object to a line is expected\n"
        f"    {file} line 26 has no column text; did you mean txt? data.source.column can be one "
        "it has: txt\n"
        "    and 2 more, the first of each kind is named\n"
        "data.checks.offending=drop leaves them out"
    )
    for checks in (None, Checks()):
        for tokenizer in (Tokenizer(), Tokenizer(kind="bpe", vocab=260)):
            with pytest.raises(UserError) as refused:
                prepare(Data(source=source, checks=checks, **how), tokenizer)
            assert str(refused.value) == expected
    kept = tokenized(Data(source=source, checks=Checks(offending="drop"), **how), Tokenizer())
    assert kept.split("train").documents == 24
    assert dict(facts(kept))["examples"] == "30 read, 24 kept"


def test_where_every_row_fails_alike_one_is_named_after_a_thousand(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n' * 1500 + "not read any more")
    for tokenizer in (Tokenizer(), Tokenizer(kind="bpe", vocab=260)):
        with pytest.raises(UserError) as refused:
            prepare(Data(source=jsonl.Source(path=str(file)), cache=str(tmp_path / "c")), tokenizer)
        assert str(refused.value) == (
            f"{file} line 1 has no column text; data.source.column can be one it has: prompt"
        )
    assert not list(tmp_path.glob("c/vocabularies/*"))  # of nothing
