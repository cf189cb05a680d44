"""Latin squares with cells left blank: made of a seed, and dealt new digits in every epoch."""

import numpy as np

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
        made = [self._row(int(number)) for number in numbers]
        if self.augment and epochs is not None:
            pairs = zip(made, numbers, epochs, strict=True)
            made = [self._relabelled(*one, seed) for one in pairs]
        cells = self.size**2
        solution = np.array([one[0] for one in made], np.int32).reshape(-1, cells)
        is_blank = np.array([one[1] for one in made], bool).reshape(-1, cells)
        tokens = np.where(is_blank, BLANK, solution).astype(np.int32)
        return {
            "tokens": tokens,
            "targets": solution,
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

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The solution of a puzzle, and which of its cells are blank."""
        random = np.random.default_rng([self.seed, number])
        shift, cells = int(random.integers(self.size)), np.arange(self.size)
        solution = 1 + (cells[:, None] + shift + cells[None, :]) % self.size
        return solution.ravel(), random.random(self.size**2) < 0.5

    def _relabelled(
        self, one: tuple[np.ndarray, np.ndarray], number: int, epoch: int, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same puzzle with other digits."""
        digits = np.random.default_rng([seed, int(epoch), int(number)]).permutation(self.size)
        return 1 + digits[one[0] - 1], one[1]

    def _candidates(self, tokens: np.ndarray) -> np.ndarray:
        digits = 1 + np.arange(self.size)
        has = (tokens.reshape(-1, self.size, self.size, 1) == digits).any(axis=2)
        free = np.repeat(~has, self.size, axis=1)  # every cell of a row has the same ones
        return free.astype(np.uint8)
