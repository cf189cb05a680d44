"""Latin squares with cells left blank: made of a seed, and dealt new digits in every epoch."""

import numpy as np

from windlass.chance import keys, mix, permutations
from windlass.columns import Column
from windlass.config import section
from windlass.sources import Blocks

BLANK = 0


@section
class Source(Blocks):
    """Puzzles of size × size cells: row r, column c holds the digit 1 + (r + shift + c) % size."""

    count: int = 64  # puzzles
    size: int = 4  # digits, rows and columns
    seed: int = 0  # another seed, other puzzles
    augment: bool = True  # whether training relabels the digits anew in every epoch

    def __post_init__(self):
        if self.size < 2:
            raise ValueError(f"size is {self.size}; a square has at least 2 rows")

    @property
    def total(self) -> int:
        return self.count

    @property
    def columns(self) -> dict[str, Column]:
        cells = (self.size**2,)
        return {
            "tokens": Column(np.int32, cells),  # the puzzle; 0 where a cell is blank
            "targets": Column(np.int32, cells),  # its solution
            "weight": Column(np.float32, cells),  # 1 where a cell is blank
            "position": Column(np.int32, cells),
            "document": Column(np.int32, cells, padding=-1),
            "puzzle": Column(np.int32, padding=-1),
            "candidates": Column(np.uint8, (*cells, self.size)),  # 1: the row does not have it yet
        }

    @property
    def hashed(self) -> tuple[str, ...]:
        return "tokens", "puzzle"

    @property
    def vocab(self) -> int:
        return 1 + self.size

    def fingerprint(self) -> str:
        return f"latin squares {len(self)} {self.size} {self.seed} {self.augment}"

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        solution, is_blank = self._squares(numbers)
        if self.augment and epochs is not None:
            # Other digits for the same square: which follows from seed, epoch and row alone.
            digits = permutations(keys(seed, epochs, numbers), self.size)
            solution = np.take_along_axis(digits, solution - 1, axis=1) + 1
        tokens, cells = np.where(is_blank, BLANK, solution).astype(np.int32), self.size**2
        return {
            "tokens": tokens,
            "targets": solution.astype(np.int32),
            "weight": is_blank.astype(np.float32),
            "position": np.tile(np.arange(cells, dtype=np.int32), (len(numbers), 1)),
            "document": np.zeros((len(numbers), cells), np.int32),
            "puzzle": numbers.astype(np.int32),
            "candidates": self._candidates(tokens),
        }

    def shown(self, row: dict[str, np.ndarray]) -> str:
        digits = ["." if token == BLANK else str(token) for token in row["tokens"]]
        lines = [" ".join(digits[at : at + self.size]) for at in range(0, len(digits), self.size)]
        return "\n".join([f"puzzle {row['puzzle']}", *lines])

    def _squares(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The solutions of some puzzles, and which of their cells are blank."""
        of_row, cells = keys(self.seed, numbers), np.arange(self.size**2)
        shift = (of_row % np.uint64(self.size)).astype(np.int64)[:, None]
        solution = 1 + (cells // self.size + shift + cells) % self.size
        return solution, mix(of_row[:, None] + cells.astype(np.uint64)) % np.uint64(2) == 1

    def _candidates(self, tokens: np.ndarray) -> np.ndarray:
        digits = 1 + np.arange(self.size)
        has = (tokens.reshape(-1, self.size, self.size, 1) == digits).any(axis=2)
        free = np.repeat(~has, self.size, axis=1)  # every cell of a row has the same ones
        return free.astype(np.uint8)
