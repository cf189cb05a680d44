"""Mazes: walls drawn at random, with the shortest way from a start to a goal, many at once."""

import numpy as np

from windlass.chance import mix

WALL, SPACE, START, GOAL, PATH = range(5)
FAR = 2**14  # steps: farther than any cell


def walls(keys: np.ndarray, size: int, share: float) -> np.ndarray:
    """Walls of a maze for each key, `[mazes, size, size]`; a cell is one with chance `share`."""
    bits = mix(keys[:, None] + np.arange(size**2, dtype=np.uint64)) >> np.uint64(11)
    return (bits / 2.0**53 < share).reshape(-1, size, size)


def distances(is_wall: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Steps from a cell of each maze to every other, by breadth-first search; `FAR`: no way.

    All mazes go a step at a time.
    """
    count, size, _ = is_wall.shape
    far = np.full((count, size + 2, size + 2), FAR, np.int16)
    inner, every = far[:, 1:-1, 1:-1], np.arange(count)
    is_new = np.zeros((count, size + 2, size + 2), bool)
    is_new[every, cells // size + 1, cells % size + 1] = True
    inner[is_new[:, 1:-1, 1:-1]] = 0
    for step in range(1, size**2):
        near = is_new[:, :-2, 1:-1] | is_new[:, 2:, 1:-1]
        near |= is_new[:, 1:-1, :-2] | is_new[:, 1:-1, 2:]
        near &= ~is_wall & (inner == FAR)
        if not near.any():
            break
        inner[near] = step
        is_new[:, 1:-1, 1:-1] = near
    return inner


def mazes(keys: np.ndarray, size: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A maze for each key, the same with the shortest way marked, and the steps of that way.

    The start is any free cell, and the goal the farthest from it. Of ways of one length the way is
    the one that turns up before down, left and right, seen from the goal.
    """
    is_wall, every = walls(keys, size, share), np.arange(len(keys))
    draw = mix(mix(keys)[:, None] + np.arange(size**2, dtype=np.uint64))
    draw[is_wall.reshape(len(keys), -1)] = 0
    start = draw.argmax(axis=1)
    is_wall[every, start // size, start % size] = False
    far = distances(is_wall, start)
    goal = np.where(far == FAR, -1, far).reshape(len(keys), -1).argmax(axis=1)
    steps = far[every, goal // size, goal % size].astype(int)
    puzzle = np.where(is_wall, WALL, SPACE).astype(np.int8)
    puzzle[every, start // size, start % size] = START
    answer = puzzle.copy()
    bordered = np.pad(far, ((0, 0), (1, 1), (1, 1)), constant_values=FAR)
    row, column = goal // size, goal % size
    for _ in range(int(steps.max(initial=0))):
        now = far[every, row, column]
        around = np.stack([bordered[every, row + 1 + r, column + 1 + c] for r, c in AROUND], axis=1)
        turn = np.where((now > 0)[:, None], around, FAR).argmin(axis=1)
        moves = now > 0
        row, column = row + moves * AROUND[turn, 0], column + moves * AROUND[turn, 1]
        answer[every, row, column] = np.where(
            moves & (far[every, row, column] > 0), PATH, answer[every, row, column]
        )
    for board in (puzzle, answer):
        board[every, goal // size, goal % size] = GOAL
    return puzzle.reshape(len(keys), -1), answer.reshape(len(keys), -1), steps


AROUND = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])


def dihedral(size: int) -> np.ndarray:
    """Cells that each cell comes from, under each of the 8 symmetries of a square."""
    square = np.arange(size**2).reshape(size, size)
    turned = [np.rot90(one, k) for one in (square, square.T) for k in range(4)]
    return np.stack(turned).reshape(8, -1)


def turns(keys: np.ndarray) -> np.ndarray:
    """The number of one of these symmetries for each key."""
    return (mix(keys) >> np.uint64(61)).astype(int)
