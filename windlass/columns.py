"""Columns of a batch: the dtype of each, its axes behind that of the rows, and its files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.errors import UserError

LENGTH = "length"  # the sequence axis, as long as data.length says
OPEN = 96  # files of a reader: each takes a descriptor, of which a process may have 1024


# In packed rows each document is in one piece, and padding is behind them all.
DocumentsInRows = Literal["one", "several"]


@dataclass(frozen=True)
class Column:
    """A column of a batch: `Column(np.int32)` has a number for each row.

    `Column(np.int32, ("length",))` has one for each position, `Column(np.float16, ("length", 64))`
    64 of them. `padding` stands in rows that only fill up the last batch of an evaluation.
    """

    dtype: np.dtype
    axes: tuple[int | str, ...] = ()
    padding: int | float = 0

    def __init__(
        self, dtype: npt.DTypeLike, axes: tuple[int | str, ...] = (), padding: int | float = 0
    ):
        for name, value in (("dtype", np.dtype(dtype)), ("axes", axes), ("padding", padding)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, ('rows', *self.axes)))}]"

    def sized(self, length: int) -> "Column":
        """The same with a number for every axis."""
        return replace(self, axes=tuple(length if axis == LENGTH else axis for axis in self.axes))

    def shape(self, rows: int) -> tuple[int, ...]:
        """Array shape of a batch of `rows`, for a column whose axes are numbers."""
        return (rows, *(int(axis) for axis in self.axes))

    def padded(self, rows: int) -> np.ndarray:
        """An array of `rows` rows of padding."""
        return np.full(self.shape(rows), self.padding, self.dtype)


class Picture(NamedTuple):
    """A row as a grid of cells, for pages."""

    columns: int
    symbols: tuple[str, ...] = ()  # the text of each token; beyond them, its number
    colors: tuple[str, ...] = ()  # the fill of each token, as #rrggbb; empty: none
    box: int | None = None  # cells between heavier lines


def square(columns: Mapping[str, Column]) -> Picture | None:
    """Rows of tokens with targets as a square of numbers; None where they are no square."""
    if not {"tokens", "targets"} <= set(columns):
        return None
    cells = math.prod(columns["tokens"].shape(1))
    side = math.isqrt(cells)
    return Picture(side) if side**2 == cells else None


def sized(columns: Mapping[str, Column], length: int) -> dict[str, Column]:
    return {name: column.sized(length) for name, column in columns.items()}


def length_of(columns: Mapping[str, Column]) -> int:
    """Sequence length of a row: that of its tokens, or of the first column that has positions."""
    first = [columns["tokens"]] if "tokens" in columns else columns.values()
    return next((int(column.axes[0]) for column in first if column.axes), 1)


def listed(columns: Mapping[str, Column]) -> str:
    """`tokens int32[rows, 16], ...`: columns as an error names them."""
    return ", ".join(f"{name} {column}" for name, column in columns.items())


class StoredColumn(NamedTuple):
    """A column on disk, a line for each row; it need not be there until it is read.

    It is one file, or one in each shard of so many rows: `DIR/NAME.npy` then stands for
    `DIR/00000/NAME.npy`, `DIR/00001/NAME.npy`, ...
    """

    column: Column  # whose axes are numbers
    file: Path
    shard: int | None = None

    def of_shard(self, number: int) -> Path:
        if self.shard is None:
            return self.file
        return shard_folder(self.file.parent, number) / self.file.name


def shard_folder(place: Path, number: int) -> Path:
    return place / f"{number:05d}"


class ColumnReader:
    """Stored columns, memory-mapped: only what is read of them is in memory.

    The files that were read last stay open.
    """

    def __init__(self, columns: Mapping[str, StoredColumn]):
        self.columns = columns
        self._opened = lru_cache(OPEN)(_mapped)

    def rows(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of these numbers, of every column."""
        return {name: self._rows(stored, numbers) for name, stored in self.columns.items()}

    def _rows(self, stored: StoredColumn, numbers: np.ndarray) -> np.ndarray:
        shard, line = np.divmod(numbers, stored.shard or np.iinfo(np.int64).max)
        values = stored.column.padded(len(numbers))
        for number in np.unique(shard).tolist():
            here = shard == number
            values[here] = self._opened(stored.of_shard(number))[line[here]]
        return values


def _mapped(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        why = "is gone" if isinstance(error, FileNotFoundError) else "is not as it was written"
        raise UserError(f"{file} {why}; put it back from a copy, or make it again") from None
