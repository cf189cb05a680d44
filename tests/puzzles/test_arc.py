"""ARC grids: on a canvas and back, and symmetries that are undone."""

import numpy as np

from windlass.chance import keys
from windlass.puzzles import arc

GRID = np.array([[0, 3, 3], [9, 0, 1]])


def test_a_grid_is_drawn_with_its_end_below_and_behind_it():
    canvas = arc.drawn(GRID, 4, 26).reshape(30, 30)
    assert canvas[4:7, 26:].tolist() == [[2, 5, 5, 1], [11, 2, 3, 1], [1, 1, 1, 0]]
    assert np.count_nonzero(canvas) == 6 + 3 + 2
    # At the edge there is no room for an end, and none is needed.
    full = arc.drawn(np.full((30, 30), 7))
    assert (full == 9).all() and arc.cropped(full).shape == (30, 30)


def test_the_largest_grid_of_colors_is_cropped_from_the_corner():
    assert (arc.cropped(arc.drawn(GRID)) == GRID).all()
    torn = arc.drawn(GRID)
    torn[31] = arc.END  # the second row ends after its first cell: one row of three is left
    assert arc.cropped(torn).tolist() == [[0, 3, 3]]
    torn[2] = 40  # no color at all: two of two are more than two of one
    assert arc.cropped(torn).tolist() == [[0, 3]]
    assert arc.cropped(np.zeros(900, int)).size == 0


def test_symmetries_are_all_that_there_are_and_each_is_undone():
    drawn = arc.symmetries(keys(0, np.arange(400)))
    assert {one.turn for one in drawn} == {*range(8)}
    assert len({bytes(one(GRID)) + bytes([one.turn]) for one in drawn}) > 300
    assert all(one.colors[0] == 0 and {*one.colors.tolist()} == {*range(10)} for one in drawn)
    assert all((one.inverse(one(GRID)) == GRID).all() for one in drawn)
    plain = np.arange(6).reshape(2, 3)
    turned = {arc.GridSymmetry(turn, np.arange(10))(plain).tobytes() for turn in range(8)}
    assert len(turned) == 8
