import json
import os
from pathlib import Path

import pyarrow
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
            "is not JSON (Expecting value at column 2); one JSON object to a line is expected",
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


ROWS = [{"text": f'Größe {n}, "[{{,\\', "n": [n, {"m": None}]} for n in range(50)]


def compressed(path: Path, raw: bytes) -> Path:
    codec = {".gz": "gzip", ".zst": "zstd"}[path.suffix]
    with pyarrow.CompressedOutputStream(str(path), codec) as out:
        out.write(raw)
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array_of_objects_is_read_by_number(tmp_path: Path, indent: int | None, mark: str):
    file = tmp_path / "alpaca_data.json"
    written = json.dumps(ROWS, indent=indent, ensure_ascii=False)
    file.write_text(f"{mark} \n{written}\n", encoding="utf-8")
    source = Source(path=str(file))
    assert len(source) == len(ROWS)
    for number in (0, 49, 7, 8):
        assert source.row(number) == ROWS[number]
    assert source.where(7) == f"{file} row 8"
    assert len(Source(path=str(file), limit=3)) == 3
    file.write_text("[ ]")
    assert len(Source(path=str(file))) == 0


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_is_read_by_number(tmp_path: Path, ending: str):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    compressed(tmp_path / f"a.jsonl{ending}", lines)
    compressed(tmp_path / f"b.json{ending}", json.dumps(ROWS).encode())
    for path, count in ((tmp_path, 50), (tmp_path / f"*.json*{ending}", 100)):
        source = Source(path=str(path))
        assert len(source) == count
        for number in (0, count - 1, 7, 8):
            assert source.row(number) == ROWS[number % 50]
    assert source.where(50) == f"{tmp_path}/b.json{ending} row 1"
    one = (tmp_path / f"a.jsonl{ending}").read_bytes()
    (tmp_path / f"a.jsonl{ending}").write_bytes(one + one)  # as `cat` joins them
    assert len(Source(path=str(tmp_path))) == 100


def test_compressed_files_are_unpacked_up_to_the_limit_and_with_few_open_at_a_time(tmp_path: Path):
    for number in range(70):
        file = tmp_path / f"{number:02}.jsonl.gz"
        compressed(file, f'\n{{"text": "a{number}"}}\n{{"text": "b"}}\n'.encode())
    before = len(os.listdir("/proc/self/fd"))
    source = Source(path=str(tmp_path))
    assert texts(source)[60:63] == ["a30", "b", "a31"]
    assert source.where(62) == f"{tmp_path}/31.jsonl.gz line 2"
    assert len(os.listdir("/proc/self/fd")) < before + 5
    (tmp_path / "02.jsonl.gz").write_bytes(b"no gzip")
    assert texts(Source(path=str(tmp_path), limit=4)) == ["a0", "b", "a1", "b"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_or_is_none_is_named(tmp_path: Path, ending: str):
    file = compressed(tmp_path / f"a.jsonl{ending}", json.dumps(ROWS).encode() * 50)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b'{"text": "plain"}\n'):
        file.write_bytes(content)
        with pytest.raises(UserError) as refused:
            len(Source(path=str(file)))
        assert str(refused.value).startswith(f"{file} cannot be unpacked as ")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"a": 1} {"a": 2}]', "Expecting ',' delimiter at line 1, column 11"),
        ('[{"a": 1},\n{"a": }]', "Expecting value at line 2, column 7"),
        ('[{"a": 1},]', "Expecting value at line 1, column 11"),
        ('[{"a": 1}', "the array has no end"),
        ('[{"a": 1}]\n[{"a": 2}]', "Extra data at line 2, column 1"),
        ("[" * 100_000, "row 1 is nested too deeply"),
    ],
)
def test_an_array_that_is_not_json_is_refused_with_the_place(
    tmp_path: Path, content: str, why: str
):
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        len(Source(path=str(file)))
    assert str(refused.value) == (
        f"{file} is not JSON ({why}); an array of objects, or one object to a line is expected"
    )


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
