"""Answers of a run to a few held-out grids, pass by pass: the file that its page is drawn from."""

import json
from pathlib import Path
from typing import NamedTuple

from windlass import files
from windlass.columns import Picture


class Answered(NamedTuple):
    """A row with its answers; lists are over cells, and of `answers` over passes before."""

    tokens: list[int]
    targets: list[int]
    weight: list[float]
    answers: list[list[int]]
    halt: list[float]  # probability of halting after each pass

    @property
    def exact(self) -> list[bool]:
        """True for each pass after which all targets are met."""
        return [not any(self.is_wrong(i, one) for i in range(len(one))) for one in self.answers]

    def is_wrong(self, cell: int, answer: list[int]) -> bool:
        return self.weight[cell] > 0 and answer[cell] != self.targets[cell]


class Answers(NamedTuple):
    """Answers at a step, and how to draw them."""

    step: int
    picture: Picture
    exact: list[float]  # share of rows that were right after each pass
    of: int  # rows that this is a share of
    rows: list[Answered]


def write(path: Path, answers: Answers) -> None:
    content = answers._asdict() | {
        "picture": answers.picture._asdict(),
        "rows": [row._asdict() for row in answers.rows],
    }
    files.write(path, json.dumps(content) + "\n")


def read(path: Path) -> Answers | None:
    """The newest answers; None where there are none, or no such file as a run writes."""
    try:
        content = files.parse_json(path.read_bytes())
        picture = Picture(**content.pop("picture"))
        rows = [Answered(**row) for row in content.pop("rows")]
        found = Answers(picture=picture, rows=rows, **content)
        return found if _is_sound(found) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return None


def _is_sound(found: Answers) -> bool:
    """Shapes and types, by use of each: what somebody spoilt is not drawn."""
    passes, columns = len(found.exact), int(found.picture.columns)
    numbers = [found.step, found.of, *found.exact]
    for row in found.rows:
        grids = [row.tokens, row.targets, row.weight, *row.answers]
        if len({len(grid) for grid in grids}) != 1 or {len(row.answers), len(row.halt)} != {passes}:
            return False
        numbers += [*row.halt, *(cell for grid in grids for cell in grid)]
    is_numbers = all(type(one) in (int, float) for one in numbers)
    texts = [*found.picture.symbols, *found.picture.colors]
    return is_numbers and columns > 0 and all(isinstance(one, str) for one in texts)
