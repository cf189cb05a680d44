import csv
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.sources.csv import Source

ROWS = [
    {"id": "007", "text": "plain", "note": ""},
    {"id": "8", "text": 'with "quotes", commas\nand lines', "note": "ü 世界"},
    {"id": "", "text": "1e3", "note": "true"},
]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_every_value_is_the_text_that_stands_there(tmp_path: Path):
    write(tmp_path / "a.csv", ROWS[:2])
    write(tmp_path / "b.csv", ROWS[2:])
    source = Source(path=str(tmp_path))
    assert [source.row(index) for index in range(len(source))] == ROWS
    assert source[1] == {"text": ROWS[1]["text"]}
    assert source.where(2) == f"{tmp_path / 'b.csv'} row 1"
    assert len(Source(path=str(tmp_path), limit=2)) == 2
    long = [ROWS[0], ROWS[1] | {"text": "a,\n" * 2**20}]
    file = write(tmp_path / "long.csv", long)
    assert Source(path=str(file)).row(1) == long[1]


def test_what_is_no_table_is_refused(tmp_path: Path):
    file = write(tmp_path / "a.csv", ROWS)
    with pytest.raises(UserError) as refused:
        Source(path=str(file), column="txt")[0]
    assert str(refused.value) == (
        f"{file} row 1 has no column txt; did you mean text? "
        "data.source.column can be one it has: id, text, note"
    )
    file.write_text("id,text\n1,2,3\n")
    with pytest.raises(UserError) as refused:
        len(Source(path=str(file)))
    assert str(refused.value) == (
        f"{file} cannot be read as CSV (CSV parse error: Expected 2 columns, got 3: 1,2,3)"
    )
