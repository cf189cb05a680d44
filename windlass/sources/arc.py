"""ARC: tasks of colored grids in JSON files, each with a few pairs that show what is asked."""

import hashlib
import os
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from windlass.chance import keys, mix
from windlass.columns import Column, Picture
from windlass.config import listing, section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.puzzles import arc
from windlass.sources import Blocks, Numbered, SourceFile, decode, files

KINDS = ("train", "test")  # of pairs: demonstrations, and what is asked
# Colors as they are shown wherever ARC is: black, blue, red, green, yellow, gray, ...
PALETTE = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)


class Pair(NamedTuple):
    """An input and its output, of a task."""

    task: int
    input: np.ndarray
    output: np.ndarray

    @property
    def content(self) -> tuple[bytes, ...]:
        grids = (self.input, self.output)
        return tuple(part for grid in grids for part in (repr(grid.shape).encode(), grid.tobytes()))


class Pairs(NamedTuple):
    """The pairs of all tasks."""

    tasks: int
    trained: list[Pair]
    held_out: list[Pair]


@section
class Source(Blocks):
    """ARC tasks: a row is a pair of grids on canvases of 30 × 30 tokens.

    Tokens are 0 for padding, which weighs nothing in a target, 1 for the end of a grid, and 2 to 11
    for the colors. A task has `copies`: the first as it is, and the others each under a symmetry of
    its own, of the square and of the colors but black. A copy has an identifier, 1 + task × copies
    + copy, for models that embed one: that is all a model is told of what is asked. In every epoch
    a row is of another copy of its task and its grids stand elsewhere on the canvas; evaluation
    takes the first copy, in the upper left corner.
    """

    path: str | None = None  # a folder of tasks, of which all pairs are trained on
    # a folder of tasks whose demonstrations are trained on and whose test pairs are held out
    evaluation: str | None = None
    copies: int = 1000  # of a task, itself included
    translate: bool = True  # whether training moves grids on the canvas
    seed: int = 0  # another seed, other copies

    def __post_init__(self):
        wrong = []
        if self.path is None and self.evaluation is None:
            wrong.append("path is required, or evaluation: a folder of tasks, a JSON file each")
        if self.copies < 1:
            wrong.append(f"copies is {self.copies}; a task has at least 1, itself")
        if wrong:
            raise ValueError(*wrong)

    def described(self) -> dict[str, Any]:
        paths = {name: getattr(self, name) for name in ("path", "evaluation")}
        full = {n: x and os.path.abspath(os.path.expanduser(x)) for n, x in paths.items()}
        return Numbered.described(self) | full

    @property
    def total(self) -> int:
        return len(self._pairs.trained)

    @property
    def held_out(self) -> tuple[str, ...]:
        return () if self.evaluation is None else ("validation",)

    def held_out_numbers(self, split: str) -> np.ndarray:
        return self.total + np.arange(len(self._pairs.held_out))

    @property
    def columns(self) -> dict[str, Column]:
        cells = (arc.CELLS,)
        return {
            "tokens": Column(np.int32, cells),
            "targets": Column(np.int32, cells),
            "weight": Column(np.float32, cells),
            "position": Column(np.int32, cells),
            "document": Column(np.int32, cells, padding=-1),
            "identifier": Column(np.int32),  # of the copy of a task; 0: none
        }

    @property
    def vocab(self) -> int:
        return arc.COLOR + arc.COLORS

    @property
    def identifiers(self) -> int:
        return 1 + self._pairs.tasks * self.copies

    @property
    def variants(self) -> int:
        return self.copies

    def fingerprint(self) -> str:
        tasks, *parts = self._pairs
        content = [[(pair.task, pair.content) for pair in part] for part in parts]
        how = (tasks, len(self), self.copies, self.translate, self.seed)
        return hashlib.sha256(repr((how, content)).encode()).hexdigest()

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        if epochs is None:
            return self.variant(numbers, 0)
        drawn = keys(seed, epochs, numbers)
        places = mix(drawn + np.uint64(1)) if self.translate else None
        return self._drawn(numbers, (drawn % np.uint64(self.copies)).astype(int), places)

    def variant(self, numbers: np.ndarray, copy: int) -> dict[str, np.ndarray]:
        return self._drawn(numbers, np.full(len(numbers), copy), None)

    def restored(self, numbers: np.ndarray, copy: int, answers: np.ndarray) -> np.ndarray:
        symmetries = self._symmetries(self._tasks[numbers], np.full(len(numbers), copy))
        pairs = zip(symmetries, answers, strict=True)
        grids = [symmetry.inverse(arc.cropped(canvas)) for symmetry, canvas in pairs]
        return np.stack([arc.drawn(grid) for grid in grids])

    def shown(self, row: dict[str, np.ndarray]) -> str:
        number = int(row["identifier"]) - 1
        boards = (row[name].reshape(arc.SIDE, arc.SIDE) for name in ("tokens", "targets"))
        sides = [["".join(" |0123456789"[x] for x in line) for line in board] for board in boards]
        lines = (f"{one}  {other}".rstrip() for one, other in zip(*sides, strict=True))
        task, copy = divmod(number, self.copies)
        return "\n".join([f"task {task}, copy {copy}", *(line for line in lines if line)])

    @property
    def picture(self) -> Picture:
        """Cells by color, and | at the end of a grid."""
        return Picture(arc.SIDE, ("", "|", *[""] * arc.COLORS), ("", "", *PALETTE))

    def _drawn(
        self, numbers: np.ndarray, copies: np.ndarray, places: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        """Rows of these copies of their tasks, anywhere on the canvas by 64 bits each."""
        tasks, count = self._tasks[numbers], len(numbers)
        tokens, targets = np.zeros((2, count, arc.CELLS), np.int32)
        for at, symmetry in enumerate(self._symmetries(tasks, copies)):
            pair = self._every[numbers[at]]
            grids = [symmetry(grid) for grid in (pair.input, pair.output)]
            corner = (0, 0) if places is None else _corner(int(places[at]), grids)
            tokens[at], targets[at] = (arc.drawn(grid, *corner) for grid in grids)
        return {
            "tokens": tokens,
            "targets": targets,
            "weight": (targets != arc.PADDING).astype(np.float32),
            "position": np.tile(np.arange(arc.CELLS, dtype=np.int32), (count, 1)),
            "document": np.zeros((count, arc.CELLS), np.int32),
            "identifier": (1 + tasks * self.copies + copies).astype(np.int32),
        }

    def _symmetries(self, tasks: np.ndarray, copies: np.ndarray) -> list[arc.GridSymmetry]:
        drawn = arc.symmetries(keys(self.seed, tasks, copies))
        return [one if copy else arc.IDENTITY for one, copy in zip(drawn, copies, strict=True)]

    @cached_property
    def _every(self) -> list[Pair]:
        """Pairs by number: those of training, and behind them those that are held out."""
        return [*self._pairs.trained, *self._pairs.held_out]

    @cached_property
    def _tasks(self) -> np.ndarray:
        return np.array([pair.task for pair in self._every], int)

    @cached_property
    def _pairs(self) -> Pairs:
        trained, held_out, tasks = [], [], 0
        for key, kinds in (("path", KINDS), ("evaluation", KINDS[:1])):
            for file in self._files(key):
                task = _read(file)
                trained += [Pair(tasks, *pair) for kind in kinds for pair in task[kind]]
                others = [kind for kind in KINDS if kind not in kinds]
                held_out += [Pair(tasks, *pair) for kind in others for pair in task[kind]]
                tasks += 1
        # Public sets have tasks in common: what is held out is in no other task either.
        tested = {pair.content for pair in held_out}
        return Pairs(tasks, [pair for pair in trained if pair.content not in tested], held_out)

    def _files(self, key: str) -> list[SourceFile]:
        path = getattr(self, key)
        if path is None:
            return []
        try:
            return files(path, ".json", f"data.source.{key}")
        except UserError as refused:
            raise UserError(
                f"{refused}; `git clone https://github.com/fchollet/ARC-AGI` has such folders, "
                "data/training and data/evaluation"
            ) from None


def _corner(bits: int, grids: list[np.ndarray]) -> tuple[int, int]:
    """Place of the upper left corner that both grids have room behind."""
    room = [arc.SIDE + 1 - max(grid.shape[axis] for grid in grids) for axis in (0, 1)]
    return bits % room[0], (bits >> 32) % room[1]


def _read(file: SourceFile) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """The pairs of a task by their kind."""
    with file.open() as opened:
        text = decode(file, opened.read())
    try:
        task = parse_json(text)
    except ValueError as wrong:
        raise UserError(f"{file} is not JSON: {wrong}") from None
    if not isinstance(task, dict) or not all(isinstance(task.get(kind), list) for kind in KINDS):
        raise UserError(
            f"{file} is not an ARC task: an object with train and test, each a list of pairs"
        )
    return {
        kind: [_grids(pair, f"{file} {kind} {i}") for i, pair in enumerate(task[kind])]
        for kind in KINDS
    }


def _grids(pair: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    return _grid(pair, "input", where), _grid(pair, "output", where)


def _grid(pair: Any, name: str, where: str) -> np.ndarray:
    rows = pair.get(name) if isinstance(pair, dict) else None
    is_table = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
    if rows is None or not is_table or not rows:
        raise UserError(f"{where} has no {name}, a grid: a list of rows, each a list of colors")
    sizes = sorted({len(row) for row in rows})
    if len(sizes) > 1:
        raise UserError(f"{where} has an {name} with rows of {listing(sizes, 'and')} cells")
    if max(len(rows), sizes[0]) > arc.SIDE:
        what = f"an {name} of {len(rows)} × {sizes[0]} cells"
        raise UserError(f"{where} has {what}; a grid has up to {arc.SIDE} × {arc.SIDE}")
    colors = [color for row in rows for color in row]
    if wrong := [one for one in colors if type(one) is not int or not 0 <= one < arc.COLORS]:
        raise UserError(f"{where} has the color {wrong[0]!r} in its {name}; colors are 0 to 9")
    return np.array(rows, np.int8)
