"""Mazes as a source of blocks: their answer is a shortest way, by another search."""

from collections import deque

import numpy as np
import pytest

from windlass.errors import UserError
from windlass.sources import maze
from windlass.sources.maze import Source

MAZES = Source(size=12, count=30, shortest=15)


def steps(board: np.ndarray) -> int | None:
    """Steps from start to goal, by a search of one maze with a queue."""
    size = len(board)
    (start,) = np.argwhere(board == 3).tolist()
    seen, queue = {tuple(start): 0}, deque([tuple(start)])
    while queue:
        row, column = queue.popleft()
        if board[row, column] == 4:
            return seen[row, column]
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = 0 <= r < size and 0 <= c < size
            if inside and board[r, c] != 1 and (r, c) not in seen:
                seen[r, c] = seen[row, column] + 1
                queue.append((r, c))
    return None


def check(rows: dict[str, np.ndarray]) -> None:
    for tokens, targets in zip(rows["tokens"], rows["targets"], strict=True):
        size = round(len(tokens) ** 0.5)
        shortest = steps(tokens.reshape(size, size))
        assert shortest is not None and shortest >= 15
        # Along the marked cells alone the goal is reached, and they are no more than needed.
        way = np.where(targets == 2, 1, targets).reshape(size, size)
        assert steps(way) == shortest == np.count_nonzero(targets == 5) + 1
        assert (tokens == targets)[targets != 5].all() and (tokens[targets == 5] == 2).all()


def test_an_answer_marks_a_shortest_way_that_is_long_enough():
    rows = MAZES.rows(np.arange(30), None, 0)
    check(rows)
    assert len({*map(bytes, rows["tokens"])}) == 30 and MAZES.vocab == 6
    columns = {name: (x.dtype, x.shape[1:]) for name, x in rows.items()}
    assert columns == {name: (one.dtype, one.axes) for name, one in MAZES.columns.items()}


def test_an_epoch_turns_or_mirrors_a_maze_into_one_of_eight():
    numbers = np.zeros(100, int)
    rows = MAZES.rows(numbers, np.arange(100), 5)
    check({name: x[:10] for name, x in rows.items()})
    assert len({*map(bytes, rows["tokens"])}) == 8
    again = MAZES.rows(numbers[30:40], np.arange(30, 40), 5)
    assert (again["tokens"] == rows["tokens"][30:40]).all()


def test_a_maze_has_eight_variants_whose_answers_are_turned_back():
    numbers, plain = np.arange(5), MAZES.rows(np.arange(5), None, 0)
    every = [MAZES.variant(numbers, copy) for copy in range(MAZES.variants)]
    assert len({bytes(rows["tokens"][0]) for rows in every}) == 8
    for copy, rows in enumerate(every):
        check(rows)
        assert (MAZES.restored(numbers, copy, rows["targets"]) == plain["targets"]).all()


def test_a_maze_follows_from_seed_and_number():
    more = Source(size=12, count=40, shortest=15).rows(np.arange(30), None, 0)["tokens"]
    assert (more == MAZES.rows(np.arange(30), None, 0)["tokens"]).all()
    assert Source(seed=1).fingerprint() != Source().fingerprint()


def test_a_maze_is_shown_with_its_way():
    row = {name: x[0] for name, x in MAZES.rows(np.array([0]), None, 0).items()}
    first, *lines = MAZES.shown(row).splitlines()
    assert first == f"{np.count_nonzero(row['targets'] == 5) + 1} steps from S to G"
    assert len(lines) == 12 and {len(line) for line in lines} == {12}


def test_mazes_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError) as wrong:
        Source(size=1, count=0, walls=1.0, shortest=-1)
    assert [*wrong.value.args] == [
        "size is 1; a maze has 2 to 64 rows",
        "count is 0; there is at least 1 maze",
        "walls is 1.0; it is a share, from 0 to 0.9",
        "shortest is -1; a way has 0 to 0 steps",
    ]
    monkeypatch.setattr(maze, "TRIES", 2)
    with pytest.raises(UserError) as refused:
        Source(size=5, count=2, shortest=24).rows(np.array([0]), None, 0)
    assert str(refused.value) == (
        "data.source.shortest is 24, and 2 of 2 mazes had no such way in 2 tries; fewer steps "
        "would do"
    )
