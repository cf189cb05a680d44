"""Several sources as one: rows of each in the shares that their weights ask for."""

from collections.abc import Sequence

import numpy as np

from windlass.data.pack import Piece, Rows
from windlass.data.shuffle import mix, permuted

CYCLE = 10_000  # rows after which the order of the parts repeats: shares are multiples of 1/CYCLE


class Mixture:
    """The rows of several parts, one part's behind another's; drawn by share, each without end.

    An epoch of it is as many rows as all parts have together. A part with a larger share than its
    size begins again within it, shuffled anew, and one with a smaller share is not finished.
    """

    def __init__(self, parts: Sequence[Rows], shares: Sequence[float]):
        self.parts, self.shares = tuple(parts), tuple(shares)
        self.length = parts[0].length
        self._ends = np.cumsum([len(part) for part in parts])
        self._turns, self._given = _cycle(shares)

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
    def columns(self) -> dict[str, type[np.generic]]:
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
        """The share of all places that hold a target."""
        return self.targets / (len(self) * self.length)

    @property
    def tokens_per_row(self) -> float:
        pairs = zip(self.parts, self.shares, strict=True)
        return sum(share * part.tokens_per_row for part, share in pairs)

    @property
    def targets_per_row(self) -> float:
        pairs = zip(self.parts, self.shares, strict=True)
        return sum(share * part.targets_per_row for part, share in pairs)

    def pieces(self, number: int) -> list[Piece]:
        which = int(np.searchsorted(self._ends, number, side="right"))
        part = self.parts[which]
        return part.pieces(number - int(self._ends[which]) + len(part))

    def batch(self, numbers: np.ndarray | Sequence[int]) -> dict[str, np.ndarray]:
        """Several rows at once; the number -1 stands for a row of nothing."""
        numbers = np.asarray(numbers, np.int64)
        whose = np.searchsorted(self._ends, numbers, side="right")
        shape = (len(numbers), self.length)
        found = {name: np.empty(shape, dtype) for name, dtype in self.columns.items()}
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(whose == number)
            before = int(self._ends[number]) - len(part)
            its = np.where(numbers[here] < 0, -1, numbers[here] - before)
            for name, column in part.batch(its).items():
                found[name][here] = column
        return found

    def drawn(self, places: np.ndarray, seed: int, shuffle: bool) -> np.ndarray:
        """The numbers of the rows at some places of the endless order."""
        cycle, place = np.divmod(places, CYCLE)
        whose = self._turns[place]
        found = np.empty(len(places), np.int64)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(whose == number)
            its = cycle[here] * np.count_nonzero(self._turns == number) + self._given[place[here]]
            epochs, rows = np.divmod(its, len(part))
            if shuffle:
                own = int(mix(mix(np.array([seed])) + np.uint64(number + 1))[0] >> np.uint64(1))
                for epoch in np.unique(epochs).tolist():
                    now = epochs == epoch
                    rows[now] = permuted(rows[now], len(part), seed=own, epoch=epoch)
            found[here] = rows + int(self._ends[number]) - len(part)
        return found


def _cycle(shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Whose turn it is at each place of a cycle, and how many rows that part gave before it.

    Turns of a part are as far from each other as can be, so that every batch has about its share.
    """
    exact = np.array(shares) * CYCLE
    counts = np.floor(exact).astype(int)
    # What is left goes to those who lost most, so that the whole is a cycle.
    counts[np.argsort(counts - exact, kind="stable")[: CYCLE - counts.sum()]] += 1
    part = np.repeat(np.arange(len(counts)), counts)
    given = np.concatenate([np.arange(count) for count in counts])
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.lexsort((part, when))
    return part[order], given[order]
