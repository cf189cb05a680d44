"""Parquet files: a document is one column of one row."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import MANY, Files, Records, SourceFile, without

ROWS_AT_ONCE = 256  # in memory


@section
class Source(Files, Records):
    """The rows of a .parquet file, of every one in a folder, or of the files a pattern matches."""

    suffix: ClassVar[str] = ".parquet"

    path: str  # a file, a folder or a pattern such as data/*.parquet, or a URL of these

    @property
    def total(self) -> int:
        return sum(group.rows for group in self._groups)

    def together(self) -> int:
        return MANY  # a group of rows is decoded from its beginning

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, row = self._place(index)
        with _understood(group.file):
            text = self._texts.row(group, row)[self.column]
        if text is None:
            where = self.where(index)
            raise UserError(f"{where} has null in column {self.column}; text is expected")
        return {"text": text}

    def row(self, index: int) -> dict[str, Any]:
        group, row = self._place(index)
        with _understood(group.file):
            return self._rows.row(group, row)

    def where(self, index: int) -> str:
        group, row = self._place(index)
        return f"{group.file} row {group.before + row + 1:,}"

    def _place(self, index: int) -> tuple["RowGroup", int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[which]
        return group, index - (int(self._ends[which]) - group.rows)

    @cached_property
    def _groups(self) -> list["RowGroup"]:
        groups, rows = [], 0
        for file in self.files:
            with _understood(file):
                opened = _opened(file)
                before = 0
                for number in range(opened.num_row_groups):
                    size = opened.metadata.row_group(number).num_rows
                    groups.append(RowGroup(file, number, before, size))
                    before += size
            rows += before
            if self.limit is not None and rows >= self.limit:
                break
        return groups

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([group.rows for group in self._groups])

    @cached_property
    def _texts(self) -> "Window":
        for file in {group.file: None for group in self._groups}:
            with _understood(file):
                self._check(file, _opened(file).schema_arrow)
        return Window([self.column])

    @cached_property
    def _rows(self) -> "Window":
        return Window(None)

    def _check(self, file: SourceFile, schema: Any) -> None:
        if self.column not in schema.names:
            raise without(str(file), self.column, schema.names)
        kind = schema.field(self.column).type
        plain = str(getattr(kind, "value_type", kind))  # of a dictionary: what its words are
        if plain not in ("string", "large_string", "string_view", "null"):
            raise UserError(f"{file} has {kind} in column {self.column}; text is expected")


class RowGroup(NamedTuple):
    """Row group: the smallest part of a file that can be read without the others."""

    file: SourceFile
    number: int
    before: int  # rows of the file in front of it
    rows: int


class Window:
    """The few rows that were read last; going on from there reads on, not from the beginning."""

    def __init__(self, columns: list[str] | None):
        self._columns = columns  # None: all
        self._group: RowGroup | None = None
        self._batches: Iterator[Any] = iter(())
        self._begin, self._rows = 0, []

    def row(self, group: RowGroup, row: int) -> dict[str, Any]:
        if group is not self._group or row < self._begin:
            self._group, self._begin, self._rows = group, 0, []
            self._batches = _opened(group.file).iter_batches(
                ROWS_AT_ONCE, row_groups=[group.number], columns=self._columns
            )
        while row >= self._begin + len(self._rows):
            self._begin += len(self._rows)
            self._rows = next(self._batches).to_pylist()
        return self._rows[row - self._begin]


def _opened(file: SourceFile) -> Any:
    # Not above: it takes a moment to import, and only those who read Parquet need it.
    from pyarrow import parquet

    if file.system is None:
        return parquet.ParquetFile(file.name)
    return parquet.ParquetFile(file.system.open(file.name, "rb"), pre_buffer=True)


@contextmanager
def _understood(file: SourceFile) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    # ValueError: a text that is not UTF-8; StopIteration: fewer rows than the file says it has.
    except (ArrowException, OSError, ValueError, StopIteration, MemoryError) as wrong:
        why = str(wrong).partition("\n")[0].rstrip(".")
        raise UserError(f"{file} cannot be read as Parquet ({why})") from None
