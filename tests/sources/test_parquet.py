from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from windlass.errors import UserError
from windlass.sources import parquet
from windlass.sources.parquet import Source


def write(path: Path, rows: int = 1000, group: int = 300, **columns: Any) -> Path:
    texts = [f"document {number} of {path.name}" for number in range(rows)]
    table = pyarrow.table({"id": range(rows), "text": texts, **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=group)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of four groups of rows each, the last one shorter."""
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name)
    return tmp_path


def test_a_document_is_a_column_of_a_row_in_any_order(folder: Path):
    source = Source(path=str(folder))
    assert len(source) == 2000
    forwards = [source[number]["text"] for number in range(2000)]
    assert forwards[:1] + forwards[-1:] == ["document 0 of a.parquet", "document 999 of b.parquet"]
    for number in (1999, 0, 299, 300, 301, 299, 999, 1000, 1300, 256, 255):
        assert source[number]["text"] == forwards[number]


def test_in_order_each_row_is_decoded_once_and_few_are_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    decoded: list[int] = []
    plain = parquet._opened

    class Watched:
        def __init__(self, file):
            self.file = plain(file)

        def iter_batches(self, *how, **more):
            for batch in self.file.iter_batches(*how, **more):
                decoded.append(len(batch))
                yield batch

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(parquet, "_opened", Watched)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 64)
    source = Source(path=str(folder))
    for number in range(2000):
        source[number]
    assert sum(decoded) == 2000 and max(decoded) <= 64


def test_a_limit_looks_at_no_more_files_than_it_needs(folder: Path):
    (folder / "c.parquet").write_text("no parquet")
    assert len(Source(path=str(folder), limit=1500)) == 1500


def test_words_in_a_dictionary_and_long_text_are_text(tmp_path: Path):
    texts = pyarrow.array(["a", "b", "a"])
    for number, column in enumerate(
        (texts.dictionary_encode(), texts.cast(pyarrow.large_string()))
    ):
        file = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
        source = Source(path=str(file))
        assert [source[number]["text"] for number in range(3)] == ["a", "b", "a"]


def test_a_file_without_rows_has_no_documents(tmp_path: Path):
    write(tmp_path / "a.parquet", rows=0)
    write(tmp_path / "b.parquet", rows=2)
    source = Source(path=str(tmp_path))
    assert len(source) == 2 and source[0]["text"] == "document 0 of b.parquet"
    (tmp_path / "b.parquet").unlink()
    assert len(Source(path=str(tmp_path))) == 0


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            "txt",
            "has no column txt; did you mean text? data.source.column can be one it has: id, text",
        ),
        ("body", "has no column body; data.source.column can be one it has: id, text"),
        ("id", "has int64 in column id; text is expected"),
    ],
)
def test_a_column_that_is_not_there_or_no_text_is_refused_before_anything_is_read(
    tmp_path: Path, column: str, message: str
):
    file = write(tmp_path / "a.parquet", rows=2)
    with pytest.raises(UserError) as refused:
        Source(path=str(file), column=column)[0]
    assert str(refused.value) == f"{file} {message}"


def test_null_is_refused_with_its_row(tmp_path: Path):
    file = write(
        tmp_path / "a.parquet", rows=600, note=[None if n == 450 else "" for n in range(600)]
    )
    source = Source(path=str(file), column="note")
    assert source[449]["text"] == ""
    with pytest.raises(UserError) as refused:
        source[450]
    assert str(refused.value) == f"{file} row 451 has null in column note; text is expected"


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    file = tmp_path / "a.parquet"
    file.write_text("no parquet at all")
    with pytest.raises(UserError) as refused:
        len(Source(path=str(file)))
    said = str(refused.value)
    assert said.startswith(f"{file} cannot be read as Parquet (Parquet magic bytes not found")


def test_a_row_has_all_columns_and_a_place(folder: Path):
    source = Source(path=str(folder), column="absent")  # which only a text needs
    assert source.row(1301) == {"id": 301, "text": "document 301 of b.parquet"}
    assert source.where(1301) == f"{folder}/b.parquet row 302"
