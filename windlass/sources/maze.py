"""Mazes generated from a seed, with the shortest way from start to goal as the answer."""

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np

from windlass.chance import keys
from windlass.columns import Column, Picture
from windlass.config import section
from windlass.errors import UserError
from windlass.puzzles import maze
from windlass.sources import Blocks

DRAWN = "# SGo"  # wall, space, start, goal, way; a token is one above its place, and 0 is padding
TRIES = 256  # of a maze whose way must be so long


@section
class Source(Blocks):
    """Mazes of size × size cells; the answer is the maze with its shortest way marked.

    Tokens are 1 for a wall, 2 for a space, 3 for the start, 4 for the goal, and in the answer 5 for
    the way. The goal is the cell farthest from the start. Training sees each maze under another of
    the 8 symmetries of a square in every epoch.
    """

    size: int = 30  # rows and columns
    count: int = 1000  # mazes
    shortest: int = 0  # steps that the way has at least
    walls: float = 0.3  # share of cells that are walls
    seed: int = 0  # another seed, other mazes
    augment: bool = True  # whether training turns and mirrors mazes anew in every epoch

    def __post_init__(self):
        wrong = []
        if not 2 <= self.size <= 64:
            wrong.append(f"size is {self.size}; a maze has 2 to 64 rows")
        if self.count < 1:
            wrong.append(f"count is {self.count}; there is at least 1 maze")
        if not 0 <= self.walls <= 0.9:
            wrong.append(f"walls is {self.walls}; it is a share, from 0 to 0.9")
        if not 0 <= self.shortest < self.size**2:
            wrong.append(f"shortest is {self.shortest}; a way has 0 to {self.size**2 - 1} steps")
        if wrong:
            raise ValueError(*wrong)

    @property
    def total(self) -> int:
        return self.count

    @property
    def columns(self) -> dict[str, Column]:
        cells = (self.size**2,)
        return {
            "tokens": Column(np.int32, cells),
            "targets": Column(np.int32, cells),  # the maze with its way
            "weight": Column(np.float32, cells),
            "position": Column(np.int32, cells),
            "document": Column(np.int32, cells, padding=-1),
            "identifier": Column(np.int32),  # 0: mazes are not told apart
        }

    @property
    def vocab(self) -> int:
        return 1 + len(DRAWN)

    def fingerprint(self) -> str:
        program = hashlib.sha256(Path(maze.__file__).read_bytes()).hexdigest()
        keys = (len(self), self.size, self.shortest, self.walls, self.seed, self.augment)
        return f"mazes {keys} {program}"

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        if not self.augment or epochs is None:
            return self.variant(numbers, 0)
        turns = maze.turns(keys(seed, epochs, numbers))
        return self._turned(numbers, maze.dihedral(self.size)[turns])

    @property
    def variants(self) -> int:
        return len(maze.dihedral(self.size))

    def variant(self, numbers: np.ndarray, copy: int) -> dict[str, np.ndarray]:
        return self._turned(numbers, np.tile(maze.dihedral(self.size)[copy], (len(numbers), 1)))

    def restored(self, numbers: np.ndarray, copy: int, answers: np.ndarray) -> np.ndarray:
        return answers[:, maze.dihedral(self.size)[copy].argsort()]

    def _turned(self, numbers: np.ndarray, cells: np.ndarray) -> dict[str, np.ndarray]:
        """Mazes with each cell from that of another, under a symmetry of the square."""
        both = [np.take_along_axis(table[numbers], cells, 1) for table in self._tables]
        tokens, targets = (one.astype(np.int32) + 1 for one in both)
        count, length = tokens.shape
        return {
            "tokens": tokens,
            "targets": targets,
            "weight": np.ones((count, length), np.float32),
            "position": np.tile(np.arange(length, dtype=np.int32), (count, 1)),
            "document": np.zeros((count, length), np.int32),
            "identifier": np.zeros(count, np.int32),
        }

    def shown(self, row: dict[str, np.ndarray]) -> str:
        drawn = "".join(DRAWN[token - 1] for token in row["targets"].tolist())
        lines = [drawn[at : at + self.size] for at in range(0, self.size**2, self.size)]
        steps = drawn.count(DRAWN[maze.PATH]) + 1
        return "\n".join([f"{steps} steps from S to G", *lines])

    @property
    def picture(self) -> Picture:
        """Cells by color: walls, start and goal, the way."""
        symbols = ("", "", "", *DRAWN[2:4], "")
        return Picture(self.size, symbols, ("", "#3b4657", "", "#f6c453", "#f6c453", "#6ea8fe"))

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Mazes and their answers; each follows from the seed, its number and its try."""
        puzzles, answers = np.zeros((2, self.count, self.size**2), np.int8)
        numbers = np.arange(self.count)
        for attempt in range(TRIES):
            drawn = keys(self.seed, numbers, np.full(len(numbers), attempt))
            puzzle, answer, steps = maze.mazes(drawn, self.size, self.walls)
            is_long = steps >= max(1, self.shortest)
            puzzles[numbers[is_long]], answers[numbers[is_long]] = puzzle[is_long], answer[is_long]
            numbers = numbers[~is_long]
            if not len(numbers):
                return puzzles, answers
        raise UserError(
            f"data.source.shortest is {self.shortest}, and {len(numbers):,} of {self.count:,} "
            f"mazes had no such way in {TRIES} tries; fewer steps would do"
        )
