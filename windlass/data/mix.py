"""Mixtures: several sources as one, drawn in proportion to their weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from windlass.chance import mix
from windlass.columns import Column
from windlass.data.pack import Piece
from windlass.data.shuffle import permuted
from windlass.data.split import Arrays, Drawn, Numbers

CYCLE = 10_000  # rows after which the order of the parts repeats: shares are multiples of 1/CYCLE


class Mixture:
    """The rows of several parts, one part's behind another's; drawn by share, each without end.

    An epoch of it is as many rows as all parts have together. A part with a larger share than its
    size begins again within it, shuffled anew, and one with a smaller share is not finished.
    """

    def __init__(self, parts: Sequence[Any], shares: Sequence[float]):
        self.parts: tuple[Any, ...] = tuple(parts)  # packed sequences, or blocks
        self.shares = tuple(shares)
        self.length = parts[0].length
        self._ends = np.cumsum([len(part) for part in parts])
        self._cycle, self._ranks = _schedule(shares)

    def __reduce__(self):
        # Short: where a worker dies as it starts, whoever sends it more than a pipe holds waits on.
        return Mixture, (self.parts, self.shares)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return {name: column[0] for name, column in self.batch([number]).items()}

    @property
    def columns(self) -> dict[str, Column]:
        return self.parts[0].columns

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def targets(self) -> int:
        return sum(part.targets for part in self.parts)

    @property
    def longer(self) -> int:
        return sum(part.longer for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def efficiency(self) -> float:
        """The share of all positions that hold a target."""
        return self.targets / (len(self) * self.length)

    @property
    def tokens_per_row(self) -> float | None:
        return self._averaged([part.tokens_per_row for part in self.parts])

    @property
    def targets_per_row(self) -> float | None:
        return self._averaged([part.targets_per_row for part in self.parts])

    def part_of(self, number: int) -> int:
        """The number of the part that a row is of."""
        return int(np.searchsorted(self._ends, number, side="right"))

    def pieces(self, number: int) -> list[Piece]:
        which = self.part_of(number)
        part = self.parts[which]
        return part.pieces(number - int(self._ends[which]) + len(part))

    def batch(self, numbers: Numbers, epochs: np.ndarray | None = None, seed: int = 0) -> Arrays:
        """Several rows at once; the number -1 is a row of padding."""
        numbers = np.asarray(numbers, np.int64)
        whose = np.searchsorted(self._ends, numbers, side="right")
        batch = {name: column.padded(len(numbers)) for name, column in self.columns.items()}
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(whose == number)
            before = int(self._ends[number]) - len(part)
            its = np.where(numbers[here] < 0, -1, numbers[here] - before)
            some = None if epochs is None else epochs[here]
            for name, column in part.batch(its, some, _seed_of(seed, number)).items():
                batch[name][here] = column
        return batch

    def drawn(self, places: np.ndarray, seed: int, shuffle: bool) -> Drawn:
        """The rows at some places of the endless order."""
        cycle, place = np.divmod(places, CYCLE)
        whose = self._cycle[place]
        numbers, when = np.empty((2, len(places)), np.int64)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(whose == number)
            its = cycle[here] * np.count_nonzero(self._cycle == number) + self._ranks[place[here]]
            epochs, rows = np.divmod(its, len(part))
            when[here] = epochs
            if shuffle:
                own = _seed_of(seed, number)
                for epoch in np.unique(epochs).tolist():
                    now = epochs == epoch
                    rows[now] = permuted(rows[now], len(part), seed=own, epoch=epoch)
            numbers[here] = rows + int(self._ends[number]) - len(part)
        return Drawn(numbers, when, seed)

    def _averaged(self, each: list[float | None]) -> float | None:
        """Mean over rows as they are drawn, weighted by share; None where a part has no number."""
        values = [value for value in each if value is not None]
        if len(values) < len(each):
            return None
        return sum(share * value for share, value in zip(self.shares, values, strict=True))


def _seed_of(seed: int, part: int) -> int:
    """A seed for each part: two of the same source are not shuffled alike."""
    return int(mix(mix(np.array([seed])) + np.uint64(part + 1))[0] >> np.uint64(1))


def _schedule(shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Schedule of a cycle: the part at each place, and how many of its rows come before it.

    Places of a part are as far from each other as can be, so that every batch has about its share.
    """
    exact = np.array(shares) * CYCLE
    counts = np.floor(exact).astype(int)
    # What is left goes to those who lost most, so that the whole is a cycle.
    counts[np.argsort(counts - exact, kind="stable")[: CYCLE - counts.sum()]] += 1
    part = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.lexsort((part, when))
    return part[order], rank[order]
