"""CSV files with a line of names: a document is one column of one row."""

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import Files, Records, SourceFile

LARGEST_ROW_BYTES = 64 * 2**20  # what is parsed at a time, which holds a row at least


@section
class Source(Files, Records):
    """The rows of a .csv file, of every one in a folder, or of the files a pattern matches."""

    suffix: ClassVar[str] = ".csv"

    path: str  # a file, a folder or a pattern such as data/*.csv, or a URL of these

    @property
    def total(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> dict[str, Any]:
        which, row = self._place(index)
        return self._tables[which].slice(row, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        which, row = self._place(index)
        return f"{self.files[which]} row {row + 1:,}"

    def _place(self, index: int) -> tuple[int, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return which, index - (int(self._ends[which]) - self._tables[which].num_rows)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([table.num_rows for table in self._tables])

    @cached_property
    def _tables(self) -> list[Any]:
        return [_read(file) for file in self.files]


def _read(file: SourceFile) -> Any:
    """Table of a file, all columns as text: a number is the text that stands there."""
    # Not above: it takes a moment to import, and only those who read CSV need it.
    import pyarrow
    from pyarrow import csv

    how: dict[str, Any] = {
        "read_options": csv.ReadOptions(block_size=LARGEST_ROW_BYTES),
        "parse_options": csv.ParseOptions(newlines_in_values=True),
    }
    try:
        with file.open() as opened:
            names = csv.open_csv(opened, **how).schema.names
        kinds = csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
        with file.open() as opened:
            return csv.read_csv(opened, **how, convert_options=kinds)
    except pyarrow.ArrowException as wrong:
        why = str(wrong).partition("\n")[0].rstrip(".")
        raise UserError(f"{file} cannot be read as CSV ({why})") from None
