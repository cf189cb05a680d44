"""ARC grids: colors of up to 30 × 30 cells on a canvas, their symmetries, and the way back.

A canvas has 30 × 30 tokens: 0 is padding, 1 marks the end of a grid (the row below it and the
column behind it), and a color c is 2 + c.
"""

from typing import NamedTuple

import numpy as np

from windlass.chance import mix, permutations
from windlass.puzzles.maze import turns

SIDE = 30
CELLS = SIDE**2
PADDING, END, COLOR = 0, 1, 2  # tokens; colors follow the first
COLORS = 10  # of which 0 is black


class GridSymmetry(NamedTuple):
    """One of the 8 symmetries of a square, and a permutation of the colors but black."""

    turn: int  # quarter turns, and 4 more where the grid is transposed before
    colors: np.ndarray

    def __call__(self, grid: np.ndarray) -> np.ndarray:
        return np.rot90(self.colors[grid.T if self.turn >= 4 else grid], self.turn % 4)

    def inverse(self, grid: np.ndarray) -> np.ndarray:
        back = np.rot90(np.argsort(self.colors)[grid], -self.turn % 4)
        return back.T if self.turn >= 4 else back


IDENTITY = GridSymmetry(0, np.arange(COLORS))


def symmetries(keys: np.ndarray) -> list[GridSymmetry]:
    """A symmetry drawn for each key."""
    colors = np.zeros((len(keys), COLORS), int)
    colors[:, 1:] = 1 + permutations(mix(keys + np.uint64(1)), COLORS - 1)
    return [GridSymmetry(turn, own) for turn, own in zip(turns(keys).tolist(), colors, strict=True)]


def drawn(grid: np.ndarray, row: int = 0, column: int = 0) -> np.ndarray:
    """Tokens of a canvas with a grid on it, its upper left corner in a row and a column."""
    canvas = np.zeros((SIDE, SIDE), np.int32)
    below, behind = row + grid.shape[0], column + grid.shape[1]
    canvas[row:below, column:behind] = COLOR + grid
    canvas[below : below + 1, column:behind] = END
    canvas[row:below, behind : behind + 1] = END
    return canvas.reshape(-1)


def cropped(canvas: np.ndarray) -> np.ndarray:
    """The grid in the upper left corner of a canvas: the largest one that has colors alone."""
    tokens = canvas.reshape(SIDE, SIDE)
    is_color = (tokens >= COLOR) & (tokens < COLOR + COLORS)
    # The columns of a grid of so many rows: as many as its shortest row has.
    columns = np.minimum.accumulate(np.cumprod(is_color, axis=1).sum(axis=1))
    rows = int(np.argmax(columns * np.arange(1, SIDE + 1))) + 1
    return tokens[:rows, : columns[rows - 1]] - COLOR
