"""Grids that are solved pass by pass, as a page shows them."""

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from windlass.columns import Column, Picture, square
from windlass.reports.boards import boards
from windlass.run_folder import answers
from windlass.run_folder.answers import Answered, Answers
from windlass.training.answers import chosen

# Of a grid of 2 × 2: a clue, a cell that is right at last, one that is always, and one that is not.
ROW = Answered(
    tokens=[2, 1, 1, 1],
    targets=[2, 3, 2, 3],
    weight=[1.0, 1.0, 1.0, 1.0],
    answers=[[2, 2, 2, 2], [2, 3, 2, 2], [2, 3, 2, 2]],
    halt=[0.1, 0.6, 0.9],
)
PICTURE = Picture(2, ("", "", "a", "<b>"), ("", "", "#ff0000", "url(x)"), box=1)
ANSWERS = Answers(700, PICTURE, [0.0, 0.25, 0.5], 8, [ROW])


def shown(page: str, at: int) -> list[tuple[str, str]]:
    """Style and text of the cells that are visible after a pass."""
    (board,) = re.findall(r'<svg class="board".*?</svg>', page)
    found = []
    for cell in ElementTree.fromstring(board).iter("g"):
        style, _, span = cell.get("class", "").partition(" ")
        first, last = map(int, span[1:].split("-")) if span else (1, 99)
        if first <= at <= last:
            found.append((style, "".join(cell.itertext())))
    return found


def test_a_cell_is_given_right_or_wrong_in_each_pass_and_marked_where_it_changed():
    page = boards(ANSWERS)
    assert shown(page, 1) == [("given", "a"), ("wrong", "a"), ("right", "a"), ("wrong", "a")]
    assert shown(page, 2) == [("given", "a"), ("right", "<b>"), ("right", "a"), ("wrong", "a")]
    assert shown(page, 3) == shown(page, 2)
    assert re.findall(r'class="changed (s\d-\d)" x="([\d.]+)"', page) == [("s2-2", "10.6")]
    assert "1 cell wrong after the last pass" in page and "Held-out grids at step 700" in page
    assert re.findall(r"q after pass \d: [\d.]+", page) == [
        f"q after pass {n}: {q:.3f}" for n, q in ((1, 0.1), (2, 0.6), (3, 0.9))
    ]
    assert "grids that are solved after each pass: 50% after the last" in page


def test_a_pass_is_chosen_without_a_program_and_nothing_comes_from_elsewhere():
    page = boards(ANSWERS)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert re.findall(r'id="pass-(\d)"( checked)?', page) == [
        *(("0", " checked"), ("1", ""), ("2", ""), ("3", "")),
    ]
    (rule,) = re.findall(r"#pass-2:checked~.boards :is\((.*?)\)", page)
    assert set(rule.split(",")) == {".s1-3", ".s2-2", ".s2-3"}
    assert 'style="fill:#ff0000"' in page  # and no other form of colour


def test_rows_are_chosen_from_the_soonest_solved_to_one_that_is_not():
    right = np.arange(10) % 5  # the pass after which a row is solved; of four the last never
    reached = np.arange(4)[None, :, None] >= right[:, None, None]
    found = {
        "tokens": np.ones((10, 4), np.int32),
        "targets": np.full((10, 4), 2, np.int32),
        "weight": np.ones((10, 4), np.float32),
        "answers": np.where(reached, 2, 1) * np.ones((10, 4, 4), np.int32),
        "halt": np.linspace(0, 1, 40, dtype=np.float32).reshape(10, 4),
    }
    found["weight"][9] = 0  # padding
    made = chosen(3, Picture(2), found)
    assert [row.exact.index(True) if any(row.exact) else 4 for row in made.rows] == [
        *(0, 1, 1, 2, 3, 4),
    ]
    assert (made.of, made.exact) == (9, pytest.approx([2 / 9, 4 / 9, 6 / 9, 8 / 9], abs=1e-4))


def test_answers_are_read_as_they_were_written_and_what_is_spoilt_is_left_out(tmp_path):
    path = tmp_path / "answers.json"
    assert answers.read(path) is None
    answers.write(path, ANSWERS)
    found = answers.read(path)
    assert found is not None and boards(found) == boards(ANSWERS)
    content = json.loads(path.read_text())
    for spoilt in (
        "[1]",
        "{",
        json.dumps(content | {"exact": [0.5]}),
        json.dumps(content | {"rows": [ROW._asdict() | {"tokens": ["x"] * 4}]}),
        json.dumps(content | {"picture": {"columns": 0}}),
    ):
        path.write_text(spoilt)
        assert answers.read(path) is None


def test_rows_without_a_picture_of_their_own_are_squares_of_numbers_or_nothing():
    tokens = Column(np.int32, (16,))
    assert square({"tokens": tokens, "targets": tokens}) == Picture(4)
    assert square({"tokens": tokens}) is None
    odd = Column(np.int32, (12,))
    assert square({"tokens": odd, "targets": odd}) is None
    page = boards(Answers(1, Picture(2), [0.0] * 3, 1, [ROW]))
    assert shown(page, 1) == [("given", "2"), ("wrong", "2"), ("right", "2"), ("wrong", "2")]
