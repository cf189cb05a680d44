"""Blocks: rows that a source has ready as arrays, by number."""

from dataclasses import replace
from functools import cached_property

import numpy as np

from windlass.columns import Column, length_of, listed
from windlass.data.split import Arrays, Numbers, split
from windlass.errors import UserError
from windlass.sources import Blocks


class BlockRows:
    """The rows of a split of a source of blocks.

    Which they are follows from the shares that are held out, of rows or of groups of them, unless
    the source holds out some itself; a row is its number in the source. Of a `copy` above 0 it is
    that variant of the row.
    """

    def __init__(
        self,
        source: Blocks,
        name: str,
        validation: float,
        test: float,
        seed: int,
        copy: int = 0,
    ):
        self.source, self.name, self.copy = source, name, copy
        self.shares = {"validation": validation, "test": test, "seed": seed}
        self.columns: dict[str, Column] = dict(source.columns)

    def __reduce__(self):
        # Another process opens the source anew; nothing of what it holds is sent.
        return BlockRows, (replace(self.source), self.name, *self.shares.values(), self.copy)

    def variant(self, copy: int) -> "BlockRows":
        """The same rows under an augmentation of the source."""
        return BlockRows(self.source, self.name, **self.shares, copy=copy)

    def restored(self, answers: np.ndarray) -> np.ndarray:
        """Answers `[rows, length]` to all these rows, without their augmentation."""
        return self.source.restored(self.numbers, self.copy, answers) if self.copy else answers

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number that each row has in the source."""
        if self.name in self.source.held_out:
            return self.source.held_out_numbers(self.name)
        groups = self.source.groups
        if groups is None:
            return split(len(self.source), **self.shares)[self.name]
        chosen = split(int(groups.max()) + 1, **self.shares)[self.name]
        return np.flatnonzero(np.isin(groups, chosen))

    @property
    def length(self) -> int:
        return length_of(self.columns)

    @property
    def tokens_per_row(self) -> float | None:
        """Positions of a row that has tokens; which of them weigh anything is not known."""
        return float(self.length) if "tokens" in self.columns else None

    targets_per_row = tokens_per_row

    def batch(self, numbers: Numbers, epochs: np.ndarray | None = None, seed: int = 0) -> Arrays:
        """Several rows at once; the number -1 is a row of padding."""
        numbers = np.asarray(numbers, np.int64)
        is_row = numbers >= 0
        if is_row.all():
            return self._read(self.numbers[numbers], epochs, seed)
        padded = {name: column.padded(len(numbers)) for name, column in self.columns.items()}
        if is_row.any():
            some = None if epochs is None else epochs[is_row]
            for name, values in self._read(self.numbers[numbers[is_row]], some, seed).items():
                padded[name][is_row] = values
        return padded

    def _read(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        """Rows of the source, checked against the columns that the step is compiled for."""
        if self.copy:
            batch = self.source.variant(numbers, self.copy)
        else:
            batch = self.source.rows(numbers, epochs, seed)
        actual = {name: Column(x.dtype, x.shape[1:]) for name, x in batch.items()}
        declared = {name: replace(column, padding=0) for name, column in self.columns.items()}
        if actual != declared or any(len(x) != len(numbers) for x in batch.values()):
            kind = self.source.described()["kind"]
            raise UserError(
                f"data.source.kind is {kind}, which declares {listed(declared)}; "
                f"{len(numbers)} of its rows came as {listed(actual)}"
            )
        return batch
