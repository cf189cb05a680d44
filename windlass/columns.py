"""Columns of a batch: the dtype of each, and its axes behind that of the rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

LENGTH = "length"  # the sequence axis, as long as data.length says


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


def sized(columns: Mapping[str, Column], length: int) -> dict[str, Column]:
    return {name: column.sized(length) for name, column in columns.items()}


def length_of(columns: Mapping[str, Column]) -> int:
    """Sequence length of a row: that of its tokens, or of the first column that has positions."""
    first = [columns["tokens"]] if "tokens" in columns else columns.values()
    return next((int(column.axes[0]) for column in first if column.axes), 1)


def listed(columns: Mapping[str, Column]) -> str:
    """`tokens int32[rows, 16], ...`: columns as an error names them."""
    return ", ".join(f"{name} {column}" for name, column in columns.items())
