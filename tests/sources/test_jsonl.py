import json
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.sources.jsonl import Source


def texts(source) -> list[str]:
    return [source[index]["text"] for index in range(len(source))]


def test_a_document_is_a_column_of_a_line(tmp_path: Path):
    lines = [{"text": "first", "story": "a\r\nb"}, {"text": "second", "story": "ü 世界"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert texts(Source(path=str(file))) == ["first", "second"]
    assert texts(Source(path=str(tmp_path), column="story")) == ["a\r\nb", "ü 世界"]


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_documents(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": ""}\r\n\n{"text": "b"}')
    assert texts(Source(path=str(file))) == ["a", "", "b"]


def test_half_a_surrogate_pair_becomes_a_character_that_utf_8_has(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}')
    assert texts(Source(path=str(file))) == ["a\ufffd b 😀"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": x}',
            "is not JSON (Expecting value at column 10); one JSON object to a line is expected",
        ),
        (
            "[",
            "is not JSON (Expecting value at column 2); one JSON object to a line is expected; "
            "`jq -c '.[]'` turns an array into lines",
        ),
        ('["a"]', "is an array; one JSON object to a line is expected"),
        (
            '{"prompt": "a", "answer": "b"}',
            "has no column text; data.source.column can be one it has: prompt, answer",
        ),
        (
            '{"txt": "a", "id": 3}',
            "has no column text; did you mean txt? data.source.column can be one it has: txt, id",
        ),
        ("{}", "has no column text; data.source.column can be one it has: none"),
        ('{"text": null}', "has null in column text; text is expected"),
        ('{"text": 3}', "has a number in column text; text is expected"),
        ('{"text": {}}', "has an object in column text; text is expected"),
    ],
)
def test_a_line_that_is_no_document_is_refused_with_its_number(
    tmp_path: Path, line: str, message: str
):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    source = Source(path=str(file))
    assert source[0]["text"] == "fine"
    with pytest.raises(UserError) as refused:
        source[1]
    assert str(refused.value) == f"{file} line 3 {message}"


def test_a_row_has_all_columns_and_a_place(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"a": [{"b": "\\ud83d"}], "c": null}\n')
    source = Source(path=str(file))
    assert source.row(0) == {"a": [{"b": "\ufffd"}], "c": None}
    assert source.where(0) == f"{file} line 2"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
        ("9" * 5000, "Exceeds the limit"),
    ],
)
def test_a_line_that_python_cannot_hold_is_named(tmp_path: Path, value: str, why: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"text": {value}}}\n')
    with pytest.raises(UserError) as refused:
        Source(path=str(file))[0]
    assert str(refused.value).startswith(f"{file} line 1 is not JSON ({why}")
