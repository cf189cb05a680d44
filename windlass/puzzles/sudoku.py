"""Sudoku: a solver of many boards at once, a generator, and the symmetries of a board.

A board of size × size cells, size = box², is given by its candidates: `uint16[size², boards]`, bit
d - 1 of a cell for the digit d. Boards lie along the last axis, so that an operation on a cell is
one on contiguous numbers of all boards.
"""

from functools import cache
from itertools import permutations as orders
from typing import NamedTuple

import numpy as np

from windlass.chance import mix, permutations

TOGETHER = 2048  # boards of a round of propagation: their candidates fit a core's cache


class Solved(NamedTuple):
    """The outcome of a search, for each puzzle."""

    solutions: np.ndarray  # digits of the first one found, [puzzles, cells]; 0 where there is none
    count: np.ndarray  # solutions, as far as they were looked for
    guesses: np.ndarray  # cells that the search branched at


def solve(puzzles: np.ndarray, most: int = 2) -> Solved:
    """Search for the solutions of puzzles `[puzzles, cells]`, 0 where a cell is blank.

    Stops at `most` solutions of a puzzle, so that with 2 one solution is proved to be the only one.
    """
    return search(candidates(puzzles), most)


def candidates(puzzles: np.ndarray) -> np.ndarray:
    """Candidates of each cell by its own clue alone: one, or all where it is blank."""
    every = (1 << _size(puzzles.shape[1])) - 1
    clue = np.left_shift(np.uint16(1), puzzles.astype(np.uint16)) >> 1
    return np.ascontiguousarray(np.where(puzzles == 0, every, clue).astype(np.uint16).T)


def search(boards: np.ndarray, most: int) -> Solved:
    """Depth-first search of all boards at once: propagation, and a guess where it ends.

    A guess is at a cell with the fewest candidates, and splits a board in two: the lowest of them,
    or one of the others. So the tree of a puzzle, and the guesses that rate it, do not depend on
    the boards beside it.
    """
    cells, puzzles = boards.shape
    solutions = np.zeros((puzzles, cells), np.int8)
    count, guesses = np.zeros((2, puzzles), np.int64)
    pending, owners = [boards[:, ::-1]], [np.arange(puzzles)[::-1]]
    while pending:
        now, owner = _popped(pending, owners)
        is_open = count[owner] < most
        if not is_open.all():
            now, owner = now[:, is_open], owner[is_open]
        new, is_alive = propagated(now)
        is_stable = (new == now).all(axis=0)
        still, whose = _those(is_alive & is_stable, new, owner)
        is_full = ((still & (still - np.uint16(1))) == 0).all(axis=0)
        _note(solutions, count, *_those(is_full, still, whose))
        split, whose = _those(~is_full, still, whose)
        guesses += np.bincount(whose, minlength=puzzles)
        moving = _those(is_alive & ~is_stable, new, owner)
        for some, whose in (*((half, whose) for half in _split(split)), moving):
            if len(whose):
                pending.append(some)
                owners.append(whose)
    return Solved(solutions, np.minimum(count, most), guesses)


def _popped(pending: list, owners: list) -> tuple[np.ndarray, np.ndarray]:
    """About `TOGETHER` boards off the top of the stack."""
    some, whose, have = [], [], 0
    while pending and have < TOGETHER:
        boards, owner = pending.pop(), owners.pop()
        if over := max(0, have + len(owner) - TOGETHER):
            pending.append(boards[:, :over])
            owners.append(owner[:over])
        some.append(boards[:, over:])
        whose.append(owner[over:])
        have += len(owner) - over
    return np.concatenate(some, axis=1), np.concatenate(whose)


def _those(which: np.ndarray, boards: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, ...]:
    return boards[:, which], owner[which]


def _split(boards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boards with the lowest candidate of one cell, and with its others."""
    size = np.bitwise_count(boards)
    cell = np.where(size < 2, np.uint8(255), size).argmin(axis=0)
    every = np.arange(boards.shape[1])
    first, second = boards.copy(), boards.copy()
    lowest = boards[cell, every] & -boards[cell, every]
    first[cell, every] = lowest
    second[cell, every] ^= lowest
    return first, second


def _note(solutions: np.ndarray, count: np.ndarray, boards: np.ndarray, owner: np.ndarray) -> None:
    solutions[owner] = _digits(boards)
    np.add.at(count, owner, 1)


def _digits(boards: np.ndarray) -> np.ndarray:
    """Digits of boards whose cells have a candidate each, `[boards, cells]`."""
    return np.bitwise_count(boards - np.uint16(1)).T + 1


def propagated(boards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A round of naked and hidden singles: boards with fewer candidates, and those still possible.

    A cell that has one candidate takes it from its row, its column and its box; a digit that has
    one cell left in any of these takes the cell.
    """
    size = _size(len(boards))
    box, count = round(size**0.5), boards.shape[1]
    grid, boxes = (size, size, count), (box, box, box, box, count)
    every = np.uint16((1 << size) - 1)
    single = np.zeros_like(boards)
    np.copyto(single, boards, where=(boards & (boards - np.uint16(1))) == 0)
    alive = np.ones(count, bool)

    # Of singles: the digits of each row, column and box; a sum is above the union if one is twice.
    taken = np.zeros(grid, np.uint16)
    for view, axes in ((single.reshape(grid), 1), (single.reshape(grid), 0)):
        union = np.bitwise_or.reduce(view, axis=axes, keepdims=True)
        alive &= (union == view.sum(axis=axes, keepdims=True, dtype=np.uint16)).all(axis=(0, 1))
        taken |= union
    view = single.reshape(boxes)
    union = np.bitwise_or.reduce(view, axis=(1, 3), keepdims=True)
    alive &= (union == view.sum(axis=(1, 3), keepdims=True, dtype=np.uint16)).all(axis=(0, 1, 2, 3))
    taken.reshape(boxes)[...] |= union
    new = boards & (~taken.reshape(boards.shape) | single)

    # Of all candidates: the digits that a row, a column or a box has one cell for.
    flat, square = new.reshape(grid), new.reshape(boxes)
    places = [(i, j) for i in range(box) for j in range(box)]
    lone = np.zeros(grid, np.uint16)
    for cells, shape, whole in (
        ([flat[:, i] for i in range(size)], (size, 1, count), lone),
        ([flat[i] for i in range(size)], (1, size, count), lone),
        ([square[:, i, :, j] for i, j in places], (box, 1, box, 1, count), lone.reshape(boxes)),
    ):
        once, twice = _once_and_twice(cells)
        alive &= (once == every).all(axis=tuple(range(once.ndim - 1)))
        whole |= (once & ~twice).reshape(shape)
    lone &= flat
    np.copyto(flat, lone, where=lone != 0)
    return new, alive


def _once_and_twice(cells: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Digits that are candidates of any of these cells, and of more than one."""
    once, twice = cells[0].copy(), np.zeros_like(cells[0])
    for one in cells[1:]:
        twice |= once & one
        once |= one
    return once, twice


def _size(cells: int) -> int:
    return round(cells**0.5)


# Symmetries


class Symmetry(NamedTuple):
    """A symmetry for each of some boards: the cell that each cell comes from, and the new digits.

    Bands, the rows of each, stacks and the columns of each are permuted, the board may be
    transposed, and digits are renamed; `digits[0]` is 0, so that a blank stays one.
    """

    cells: np.ndarray
    digits: np.ndarray

    def __call__(self, boards: np.ndarray) -> np.ndarray:
        return np.take_along_axis(self.digits, np.take_along_axis(boards, self.cells, 1), 1)

    @property
    def inverse(self) -> "Symmetry":
        """The symmetries that undo these: renaming digits and moving cells commute."""
        return Symmetry(self.cells.argsort(axis=1), self.digits.argsort(axis=1).astype(np.int8))


def symmetries(keys: np.ndarray, size: int) -> Symmetry:
    """A symmetry drawn for each key."""
    box, count = round(size**0.5), len(keys)
    bits = mix(keys[:, None] + np.arange(3 * size + 2 * box + 1, dtype=np.uint64))
    digits, rows, columns, bands, more = np.split(bits, np.cumsum([size, size, size, box]), axis=1)
    rows, columns = (
        box * outer.argsort(axis=1)[:, :, None] + inner.reshape(-1, box, box).argsort(axis=2)
        for outer, inner in ((bands, rows), (more[:, :box], columns))
    )
    rows, columns = rows.reshape(-1, size, 1), columns.reshape(-1, 1, size)
    cells = (size * rows + columns).reshape(count, -1)
    transposed = (rows + size * columns).reshape(count, -1)
    is_transposed = more[:, box:] & np.uint64(1) == 1
    renamed = np.zeros((count, size + 1), np.int8)
    renamed[:, 1:] = digits.argsort(axis=1) + 1
    return Symmetry(np.where(is_transposed, transposed, cells), renamed)


# Puzzles


def grids(keys: np.ndarray) -> np.ndarray:
    """A full 9 × 9 board for each key.

    Three boxes on the diagonal are drawn and the rest is guessed, anew where that fails; of the
    board a symmetry is taken. No board depends on those beside it, as the first solution of
    `search` does.
    """
    full, left, attempt = np.zeros((len(keys), 81), np.int8), np.arange(len(keys)), 0
    while len(left):
        drawn = mix(keys[left] + np.uint64(attempt))
        full[left] = _guessed(candidates(_diagonals(drawn)))
        left, attempt = left[full[left, 0] == 0], attempt + 1
    return symmetries(mix(keys), 9)(full)


def _diagonals(keys: np.ndarray) -> np.ndarray:
    boards = np.zeros((len(keys), 9, 9), np.int8)
    for number in range(3):
        box = 1 + permutations(mix(keys + np.uint64(number + 1)), 9).reshape(-1, 3, 3)
        boards[:, 3 * number : 3 * number + 3, 3 * number : 3 * number + 3] = box
    return boards.reshape(-1, 81)


def _guessed(boards: np.ndarray) -> np.ndarray:
    """Boards filled by guesses that are never taken back; 0 where one was wrong."""
    full, left = np.zeros(boards.shape[::-1], np.int8), np.arange(boards.shape[1])
    while len(left):
        new, is_alive = propagated(boards)
        is_stable = (new == boards).all(axis=0)
        is_full = is_alive & ((new & (new - np.uint16(1))) == 0).all(axis=0) & is_stable
        full[left[is_full]] = _digits(new[:, is_full])
        is_open = is_alive & ~is_full
        guess = is_stable & is_open
        new[:, guess], _ = _split(new[:, guess])
        boards, left = _those(is_open, new, left)
    return full


def carved(full: np.ndarray, keys: np.ndarray, clues: int | None = None) -> np.ndarray:
    """Puzzles of full boards: clues go in a random order, wherever the solution stays the only one.

    Down to `clues` of them, or until none can go. A clue can go if no solution has another digit in
    its place.
    """
    puzzles, order, every = full.copy(), permutations(keys, full.shape[1]), np.arange(len(full))
    for place in range(full.shape[1]):
        cell = order[:, place]
        left = np.count_nonzero(puzzles, axis=1) > (clues or 0)
        which = every[left]
        trial = puzzles[which]
        trial[np.arange(len(which)), cell[which]] = 0
        boards = candidates(trial)
        digit = full[which, cell[which]].astype(np.uint16)
        boards[cell[which], np.arange(len(which))] ^= np.uint16(1) << digit - np.uint16(1)
        goes = which[search(boards, most=1).count == 0]
        puzzles[goes, cell[goes]] = 0
    return puzzles


@cache
def small_grids() -> np.ndarray:
    """All 288 full boards of 4 × 4 cells."""
    lines = np.array([*orders(range(1, 5))], np.uint8)
    boards = lines[np.indices((24,) * 4, np.int8).reshape(4, -1).T]
    bits = np.uint8(1) << boards
    boxes = bits.reshape(-1, 2, 2, 2, 2)
    is_full = (np.bitwise_or.reduce(bits, 1) == 30).all(axis=1)
    is_full &= (np.bitwise_or.reduce(boxes, (2, 4)) == 30).all(axis=(1, 2))
    return boards[is_full].reshape(-1, 16).astype(np.int8)


@cache
def _agreeing() -> np.ndarray:
    """Of each two boards of 4 × 4 cells, the cells that agree, a bit each; none of one and itself.

    A puzzle whose clues are among them has both as solutions.
    """
    full = small_grids()
    same = full[:, None] == full
    same[np.arange(len(full)), np.arange(len(full))] = False
    return (same << np.arange(16)).sum(axis=2).astype(np.uint16)


def small_puzzles(numbers: np.ndarray, keys: np.ndarray, clues: int | None) -> np.ndarray:
    """Puzzles of some of the 288 boards, carved as `carved` does; fast, as all boards are known."""
    others, order = _agreeing()[numbers], permutations(keys, 16)
    left = np.full(len(numbers), 0xFFFF, np.uint16)
    for place in range(16):
        is_open = np.bitwise_count(left) > (clues or 0)
        if not is_open.any():
            break
        trial = left & ~(np.uint16(1) << order[:, place].astype(np.uint16))
        is_only = ((others & trial[:, None]) != trial[:, None]).all(axis=1)
        left = np.where(is_open & is_only, trial, left)
    has_clue = left[:, None] >> np.arange(16, dtype=np.uint16) & 1 == 1
    return np.where(has_clue, small_grids()[numbers], 0).astype(np.int8)
