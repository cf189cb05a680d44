"""Sudoku of 4 × 4 and 9 × 9 cells, generated from a seed or read from a file, always solved."""

import hashlib
import os
from functools import cached_property
from math import factorial, isqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from windlass.chance import keys, mix, uniform
from windlass.columns import Column, Picture
from windlass.config import section
from windlass.errors import UserError
from windlass.puzzles import sudoku
from windlass.sources import Blocks, Numbered, SourceFile, decode, files

BLANK = 1  # the token of a blank cell; 0 is padding, and a digit d is 1 + d
GRIDS = 288  # of 4 × 4 cells
# Clues that a puzzle can be carved down to from any grid, in about any order.
FEWEST = {4: 6, 9: 30}
TRIES = 64  # of a puzzle that must need so many guesses


class Table(NamedTuple):
    """Puzzles and their solutions, `[puzzles, cells]`; 0: a blank cell."""

    puzzles: np.ndarray
    solutions: np.ndarray


@section
class Source(Blocks):
    """Sudoku puzzles with one solution each: tokens are 1 + digit, and 1 for a blank cell.

    Training sees each under another symmetry in every epoch: digits, bands, rows, stacks and
    columns permuted, transposed or not. Of 4 × 4 cells there are 288 grids, which symmetries turn
    into one another: generated puzzles keep their grid, shares are held out by grid, and training
    draws other clues of it in every epoch.
    """

    size: Literal[4, 9] = 9  # rows, columns and digits
    # a file of puzzles, one a line, row by row, . or 0 for a blank cell; null: generated
    path: str | None = None
    validation: str | None = None  # of path: a file of puzzles to hold out, in place of a share
    test: str | None = None  # of path: another, for `windlass evaluate --split test`
    count: int = 1000  # generated puzzles
    clues: int | None = None  # of a generated puzzle; null: minimal, none can be left out
    guesses: int = 0  # generated: the fewest guesses that a solver needs
    seed: int = 0  # another seed, other puzzles
    augment: bool = True  # whether training sees other symmetries or clues in every epoch
    # training reads up to this share of the blank cells filled in, drawn evenly from 0 on: easy and
    # hard puzzles mixed
    reveal: float = 0.0

    def __post_init__(self):
        wrong = []
        given = {name: getattr(self, name) for name in ("validation", "test")}
        if self.path is None:
            wrong += [f"{n} is {x}; it goes with path" for n, x in given.items() if x is not None]
        if self.count < 1:
            wrong.append(f"count is {self.count}; there is at least 1 puzzle")
        fewest = FEWEST[self.size]
        if self.clues is not None and not fewest <= self.clues < self.size**2:
            most = self.size**2 - 1
            wrong.append(
                f"clues is {self.clues}; a puzzle of {self.size} rows can have {fewest} to {most}, "
                "and without the key as few as its grid allows"
            )
        if self.guesses < 0 or (self.guesses and self.size == 4):
            what = "it is a count, and for puzzles of 9 rows"
            wrong.append(f"guesses is {self.guesses}; {what}")
        if not 0 <= self.reveal < 1:
            what = "it is a share of the blanks, 0 or more, below 1"
            wrong.append(f"reveal is {self.reveal}; {what}")
        if self.reveal and not self.augment:
            wrong.append(f"reveal is {self.reveal}; it goes with augment")
        if wrong:
            raise ValueError(*wrong)

    def described(self) -> dict[str, Any]:
        paths = {name: getattr(self, name) for name in ("path", "validation", "test")}
        full = {n: x and os.path.abspath(os.path.expanduser(x)) for n, x in paths.items()}
        return Numbered.described(self) | full

    @property
    def total(self) -> int:
        return self.count if self.path is None else len(self._lines["train"])

    @property
    def held_out(self) -> tuple[str, ...]:
        return tuple(name for name in ("validation", "test") if getattr(self, name) is not None)

    def held_out_numbers(self, split: str) -> np.ndarray:
        return self._begins[split] + np.arange(len(self._lines[split]))

    @property
    def groups(self) -> np.ndarray | None:
        return np.arange(len(self)) % GRIDS if self._is_small else None

    @property
    def columns(self) -> dict[str, Column]:
        cells = (self.size**2,)
        return {
            "tokens": Column(np.int32, cells),
            "targets": Column(np.int32, cells),  # the solution
            "weight": Column(np.float32, cells),
            "position": Column(np.int32, cells),
            "document": Column(np.int32, cells, padding=-1),
            "identifier": Column(np.int32),  # 0: puzzles are not told apart
        }

    @property
    def vocab(self) -> int:
        return 2 + self.size

    def fingerprint(self) -> str:
        made = (self.count, self.clues, self.guesses, self.seed, _maker())
        what = made if self.path is None else tuple(self._lines.items())
        content = repr((self.size, len(self), self.augment, self.reveal, what))
        return hashlib.sha256(content.encode()).hexdigest()

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        if epochs is None or not self.augment:
            return self._rows(self._plain(numbers))
        drawn = keys(seed, epochs, numbers)
        if self._is_small:
            table = self._small(numbers, drawn)
        else:
            table = Table(*map(sudoku.symmetries(drawn, self.size), self._plain(numbers)))
        return self._rows(self._revealed(table, drawn))

    def _revealed(self, table: Table, drawn: np.ndarray) -> Table:
        """Puzzles with some of their blanks filled in: a share drawn for each, then its cells."""
        if not self.reveal:
            return table
        share, order = (keys(number, drawn) for number in (1, 2))
        most = self.reveal * uniform(share)
        cells = mix(order[:, None] + np.arange(table.puzzles.shape[1], dtype=np.uint64))
        is_known = (table.puzzles > 0) | (uniform(cells) < most[:, None])
        return table._replace(puzzles=np.where(is_known, table.solutions, 0))

    @property
    def variants(self) -> int:
        box = round(self.size**0.5)
        # digits, two times bands with the lines of each, transposed or not
        return 2 * factorial(self.size) * factorial(box) ** (2 * box + 2)

    def variant(self, numbers: np.ndarray, copy: int) -> dict[str, np.ndarray]:
        plain = self._plain(numbers)
        return self._rows(Table(*map(self._symmetry(numbers, copy), plain)) if copy else plain)

    def restored(self, numbers: np.ndarray, copy: int, answers: np.ndarray) -> np.ndarray:
        if not copy:
            return answers
        # A model may answer padding, or a token that stands for nothing: both are blanks.
        digits = np.where(answers <= BLANK + self.size, np.maximum(answers - BLANK, 0), 0)
        return self._symmetry(numbers, copy).inverse(digits).astype(np.int32) + BLANK

    def _symmetry(self, numbers: np.ndarray, copy: int) -> sudoku.Symmetry:
        return sudoku.symmetries(keys(self.seed, np.full(len(numbers), copy), numbers), self.size)

    def _plain(self, numbers: np.ndarray) -> Table:
        """Puzzles by number as they are, without augmentation."""
        if not self._is_small:
            return self._read(numbers)
        return self._small(numbers, keys(self.seed, numbers))

    def _small(self, numbers: np.ndarray, drawn: np.ndarray) -> Table:
        which = numbers % GRIDS
        return Table(sudoku.small_puzzles(which, drawn, self.clues), sudoku.small_grids()[which])

    def _rows(self, table: Table) -> dict[str, np.ndarray]:
        puzzles, solutions = table
        count, cells = puzzles.shape
        return {
            "tokens": puzzles.astype(np.int32) + BLANK,
            "targets": solutions.astype(np.int32) + BLANK,
            "weight": np.ones((count, cells), np.float32),
            "position": np.tile(np.arange(cells, dtype=np.int32), (count, 1)),
            "document": np.zeros((count, cells), np.int32),
            "identifier": np.zeros(count, np.int32),
        }

    def shown(self, row: dict[str, np.ndarray]) -> str:
        puzzle, solution = (row[name] - BLANK for name in ("tokens", "targets"))
        (guesses,) = sudoku.solve(puzzle[None]).guesses.tolist()
        sides = zip(*(_drawn(board, self.size) for board in (puzzle, solution)), strict=True)
        rated = f"{np.count_nonzero(puzzle)} clues, {guesses} guesses"
        return "\n".join([rated, *("   ".join(pair) for pair in sides)])

    @property
    def picture(self) -> Picture:
        """Cells as digits, in boxes."""
        digits = map(str, range(1, self.size + 1))
        return Picture(self.size, ("", "", *digits), box=isqrt(self.size))

    @property
    def _is_small(self) -> bool:
        """Any of the few grids, known by number."""
        return self.size == 4 and self.path is None

    def _read(self, numbers: np.ndarray) -> Table:
        """Puzzles by number: those of training, and behind them those of each file held out."""
        names = list(self._begins)
        which = np.searchsorted([*self._begins.values()], numbers, side="right") - 1
        puzzles, solutions = np.zeros((2, len(numbers), self.size**2), np.int8)
        for place in np.unique(which).tolist():
            here, table = which == place, self._table(names[place])
            own = numbers[here] - self._begins[names[place]]
            puzzles[here], solutions[here] = table.puzzles[own], table.solutions[own]
        return Table(puzzles, solutions)

    @cached_property
    def _begins(self) -> dict[str, int]:
        """The number of the first puzzle of each split."""
        begins, end = {"train": 0}, self.total
        for name in self.held_out:
            begins[name] = end
            end += len(self._lines[name])
        return begins

    def _table(self, split: str) -> Table:
        if split not in self._tables:
            self._tables[split] = self._made() if self.path is None else self._solved(split)
        return self._tables[split]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}  # of each split, when it is first read

    @cached_property
    def _lines(self) -> dict[str, tuple[str, ...]]:
        """The lines of each file."""
        names = {"train": "path", "validation": "validation", "test": "test"}
        paths = {split: getattr(self, key) for split, key in names.items()}
        return {
            split: tuple(
                line
                for file in files(path, ".txt", f"data.source.{names[split]}")
                for line in _text(file)
            )
            for split, path in paths.items()
            if path is not None
        }

    def _solved(self, split: str) -> Table:
        """The puzzles of a file, solved."""
        path = getattr(self, "path" if split == "train" else split)
        lines = self._lines[split]
        for number, line in enumerate(lines, start=1):
            if len(line) != self.size**2 or line.strip("." + "0123456789"[: self.size + 1]):
                raise UserError(f"{path} line {number} {self._wrong(line)}")
        text = "".join(lines).replace(".", "0").encode()
        puzzles = (np.frombuffer(text, np.uint8) - ord("0")).astype(np.int8)
        puzzles = puzzles.reshape(len(lines), self.size**2)
        solved = sudoku.solve(puzzles)
        if (solved.count != 1).any():
            number = int(np.argmax(solved.count != 1))
            has = "several solutions" if solved.count[number] else "no solution"
            raise UserError(f"{path} line {number + 1} has {has}; a puzzle has exactly one")
        return Table(puzzles, solved.solutions)

    def _wrong(self, line: str) -> str:
        cells = self.size**2
        if len(line) != cells:
            other = {4: 9, 9: 4}[self.size]
            hint = f": data.source.size={other} would do" if len(line) == other**2 else ""
            return f"has {len(line)} characters; a puzzle has {cells}, row by row{hint}"
        return f"is {line}; a cell is 1 to {self.size}, and . or 0 where it is blank"

    def _made(self) -> Table:
        """Generated puzzles; each follows from the seed, its number and its try."""
        numbers = np.arange(self.count)
        puzzles, solutions = np.zeros((2, self.count, self.size**2), np.int8)
        for attempt in range(TRIES):
            drawn = keys(self.seed, numbers, np.full(len(numbers), attempt))
            full = sudoku.grids(drawn)
            found = sudoku.carved(full, drawn, self.clues)
            is_good = np.ones(len(numbers), bool)
            if self.clues is not None:
                is_good &= np.count_nonzero(found, axis=1) == self.clues
            if self.guesses:
                is_good &= sudoku.solve(found).guesses >= self.guesses
            puzzles[numbers[is_good]], solutions[numbers[is_good]] = found[is_good], full[is_good]
            numbers = numbers[~is_good]
            if not len(numbers):
                return Table(puzzles, solutions)
        raise UserError(
            f"data.source.guesses is {self.guesses}, and {len(numbers):,} of {self.count:,} "
            f"puzzles did not need so many in {TRIES} tries; fewer would do"
        )


def _text(file: SourceFile) -> list[str]:
    with file.open() as opened:
        return decode(file, opened.read()).split()


def _maker() -> str:
    """Hash of the program that generates puzzles: another one makes others."""
    return hashlib.sha256(Path(sudoku.__file__).read_bytes()).hexdigest()


def _drawn(board: np.ndarray, size: int) -> list[str]:
    """The lines of a board, with its boxes apart."""
    box = round(size**0.5)
    rule = "+".join(["-" * (2 * box + 1)] * box).join("++")
    lines = [rule]
    for number, row in enumerate(board.reshape(size, box, box).tolist(), start=1):
        parts = (" ".join(str(digit or ".") for digit in some) for some in row)
        lines.append("| " + " | ".join(parts) + " |")
        if number % box == 0:
            lines.append(rule)
    return lines
