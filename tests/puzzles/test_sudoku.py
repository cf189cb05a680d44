"""Sudoku: the solver against one that tries every digit, symmetries, and carved puzzles."""

import numpy as np

from windlass.chance import keys
from windlass.puzzles import sudoku

# Published as hard for people and for programs.
HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."


def board(text: str) -> np.ndarray:
    return np.array([[0 if one == "." else int(one) for one in text]], np.int8)


def is_right(full: np.ndarray, size: int) -> bool:
    """Every digit in every row, column and box, of all boards."""
    box = round(size**0.5)
    grid = full.reshape(-1, size, size)
    boxes = full.reshape(-1, box, box, box, box).swapaxes(2, 3).reshape(-1, size, size)
    digits = np.arange(1, size + 1)
    return all(
        (np.sort(units, axis=2) == digits).all() for units in (grid, grid.swapaxes(1, 2), boxes)
    )


def solutions(puzzle: list[int]) -> int:
    """Solutions of a 4 × 4 puzzle, by trying every digit in every cell."""
    if 0 not in puzzle:
        return 1
    cell = puzzle.index(0)
    row, column = divmod(cell, 4)
    peers = [
        at
        for at in range(16)
        if at // 4 == row or at % 4 == column or (at // 8, at % 4 // 2) == (row // 2, column // 2)
    ]
    taken = {puzzle[at] for at in peers}
    free = (digit for digit in range(1, 5) if digit not in taken)
    return sum(solutions([*puzzle[:cell], digit, *puzzle[cell + 1 :]]) for digit in free)


def test_solutions_are_counted_as_by_trying_every_digit():
    rng = np.random.default_rng(0)
    full = sudoku.small_grids()[rng.integers(288, size=60)]
    puzzles = np.where(rng.random((60, 16)) < 0.35, full, 0)
    puzzles[:10, 0] = 1  # some have none
    found = sudoku.solve(puzzles, most=1000)
    assert found.count.tolist() == [solutions(puzzle) for puzzle in puzzles.tolist()]
    has = found.count > 0
    assert has.sum() > 50 and not has.all() and is_right(found.solutions[has], 4)
    assert (found.solutions[has] == puzzles[has])[puzzles[has] > 0].all()


def test_a_hard_puzzle_is_solved_and_rated_the_same_beside_others():
    alone = sudoku.solve(board(HARD))
    assert alone.count.tolist() == [1] and is_right(alone.solutions, 9)
    assert (alone.solutions == board(HARD))[board(HARD) > 0].all()
    easy = np.where(np.arange(81) % 4 > 0, alone.solutions, 0)
    both = sudoku.solve(np.concatenate([easy, board(HARD), board("." * 81)]))
    assert both.guesses.tolist()[:2] == [0, *alone.guesses.tolist()] and alone.guesses > 20
    assert both.count.tolist() == [1, 1, 2]  # and no more are looked for


def test_there_are_288_grids_of_four_rows():
    full = sudoku.small_grids()
    assert len({*map(bytes, full)}) == 288 and is_right(full, 4)


def test_a_symmetry_leaves_a_puzzle_with_its_own_solution():
    full = sudoku.solve(board(HARD)).solutions
    symmetry = sudoku.symmetries(keys(3, np.arange(500)), 9)
    puzzles, right = (symmetry(np.repeat(x, 500, 0)) for x in (board(HARD), full))
    assert is_right(right, 9) and len({*map(bytes, puzzles)}) == 500
    found = sudoku.solve(puzzles[:20])
    assert (found.count == 1).all() and (found.solutions == right[:20]).all()
    # Every cell goes everywhere, every digit becomes every other, and a blank stays one.
    many = sudoku.symmetries(keys(4, np.arange(3000)), 9)
    assert all(len({*cells}) == 81 for cells in many.cells.T.tolist())
    assert all(len({*digits}) == 9 for digits in many.digits[:, 1:].T.tolist())
    assert not many.digits[:, 0].any()


def test_carved_puzzles_have_one_solution_and_no_clue_to_spare():
    drawn = keys(0, np.arange(6))
    full = sudoku.grids(drawn)
    assert is_right(full, 9) and len({*map(bytes, full)}) == 6
    puzzles = sudoku.carved(full, drawn)
    found = sudoku.solve(puzzles)
    assert (found.count == 1).all() and (found.solutions == full).all()
    spared = np.repeat(puzzles[:2], 81, 0)
    spared[np.arange(162), np.tile(np.arange(81), 2)] = 0
    has_clue = puzzles[:2].ravel() > 0
    assert (sudoku.solve(spared).count[has_clue] == 2).all()


def test_puzzles_of_four_rows_are_minimal_or_have_the_clues_that_they_should():
    numbers, drawn = np.arange(600) % 288, keys(1, np.arange(600))
    for clues, least, most in ((None, 4, 6), (9, 9, 9), (6, 6, 6)):
        puzzles = sudoku.small_puzzles(numbers, drawn, clues)
        found = sudoku.solve(puzzles)
        assert (found.count == 1).all()
        assert (found.solutions == sudoku.small_grids()[numbers]).all()
        given = np.count_nonzero(puzzles, axis=1)
        assert (given.min(), given.max()) == (least, most)
