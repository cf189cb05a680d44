"""Puzzles in arrays: the folders of .npy files that HRM and TRM are trained from."""

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.chance import keys
from windlass.columns import Column
from windlass.config import listing, section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.sources import Blocks, Numbered

ABOUT = "dataset.json"
SAMPLED = 1024  # examples whose content the fingerprint is of


class Metadata(NamedTuple):
    """The keys of `dataset.json` that rows depend on."""

    length: int
    vocab: int
    identifiers: int
    padding: int
    end: int | None
    ignored: int | None
    sets: tuple[str, ...]


class Examples(NamedTuple):
    """The arrays of a split, of all its sets: examples of puzzles, and puzzles of groups."""

    inputs: list[np.ndarray]  # of each set, [examples, length], memory-mapped
    labels: list[np.ndarray]
    begins: np.ndarray  # the first example of each set, and the end
    puzzles: np.ndarray  # the first example of each puzzle, and the end
    groups: np.ndarray  # the first puzzle of each group, and the end
    identifiers: np.ndarray  # of each puzzle
    iterations: np.ndarray | None  # passes after which an example is to halt


@section
class Source(Blocks):
    """Puzzles as arrays: `train` and the folder held out, each with `dataset.json` and .npy files.

    Files are `SET__inputs.npy` or `SET/inputs.npy`, and so `labels`, `puzzle_identifiers`,
    `puzzle_indices` (the first example of each puzzle), `group_indices` (the first puzzle of each
    group) and perhaps `iteration_targets`. Puzzles of a group are one under several augmentations:
    in every epoch of training another of them is drawn. Of the folder held out every example is
    evaluated. Labels that are padding or `ignore_label_id` weigh nothing.
    """

    path: str  # a folder with the folders of the splits
    validation: str | None = "test"  # the folder that is held out; null: none

    def described(self) -> dict[str, Any]:
        path = os.path.abspath(os.path.expanduser(self.path))
        return Numbered.described(self) | {"path": path}

    @property
    def total(self) -> int:
        return len(self._slots)

    @property
    def held_out(self) -> tuple[str, ...]:
        return () if self.validation is None else ("validation",)

    def held_out_numbers(self, split: str) -> np.ndarray:
        return self.total + np.arange(self._examples("validation").begins[-1])

    @property
    def columns(self) -> dict[str, Column]:
        cells = (self._about("train").length,)
        columns = {
            "tokens": Column(np.int32, cells),
            "targets": Column(np.int32, cells),
            "weight": Column(np.float32, cells),
            "position": Column(np.int32, cells),
            "document": Column(np.int32, cells, padding=-1),
            "identifier": Column(np.int32),
        }
        return columns | ({"iterations": Column(np.int32)} if self._has_iterations else {})

    @property
    def vocab(self) -> int:
        return max(self._about(split).vocab for split in self._splits)

    @property
    def identifiers(self) -> int:
        return max(self._about(split).identifiers for split in self._splits)

    def fingerprint(self) -> str:
        content = hashlib.sha256(repr(len(self)).encode())
        for split in self._splits:
            content.update(repr(self._about(split)).encode())
            inputs, labels, *small = self._examples(split)
            for array in (x for x in small if x is not None):
                content.update(array.tobytes())
            for array in (*inputs, *labels):
                some = array[:: max(1, len(array) // SAMPLED)]
                content.update(repr((array.shape, array.dtype.str)).encode())
                content.update(np.ascontiguousarray(some).tobytes())
        return content.hexdigest()

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        is_trained = numbers < self.total
        parts = {
            "train": (is_trained, self._drawn(numbers[is_trained], epochs, is_trained, seed)),
            "validation": (~is_trained, numbers[~is_trained] - self.total),
        }
        batch = {name: column.padded(len(numbers)) for name, column in self.columns.items()}
        for split, (here, examples) in parts.items():
            if len(examples):
                for name, values in self._read(split, examples).items():
                    batch[name][here] = values
        return batch

    def _drawn(
        self, numbers: np.ndarray, epochs: np.ndarray | None, here: np.ndarray, seed: int
    ) -> np.ndarray:
        """Examples of some rows: of one puzzle of each row's group, the first in evaluation."""
        if not len(numbers):
            return numbers
        data = self._examples("train")
        group, slot = self._slots[numbers].T
        puzzle = data.groups[group]
        if epochs is not None:
            count = (data.groups[group + 1] - puzzle).astype(np.uint64)
            puzzle = puzzle + (keys(seed, epochs[here], group) % count).astype(int)
        first = data.puzzles[puzzle]
        return first + slot % (data.puzzles[puzzle + 1] - first)

    def _read(self, split: str, examples: np.ndarray) -> dict[str, np.ndarray]:
        data, about, count = self._examples(split), self._about(split), len(examples)
        tokens, labels = np.zeros((2, count, about.length), np.int32)
        which = np.searchsorted(data.begins, examples, side="right") - 1
        for place in np.unique(which).tolist():
            here = which == place
            own = examples[here] - data.begins[place]
            tokens[here], labels[here] = data.inputs[place][own], data.labels[place][own]
        is_asked = _asked(labels, about)
        targets = np.where(is_asked, labels, 0)
        for name, values in (("inputs", tokens), ("labels", targets)):
            if values.min() < 0 or values.max() >= about.vocab:
                wrong = values[(values < 0) | (values >= about.vocab)][0]
                raise UserError(
                    f"{self._folder(split)} has {wrong} among its {name}; vocab_size of {ABOUT} is "
                    f"{about.vocab}: ids are 0 to {about.vocab - 1}"
                )
        puzzle = np.searchsorted(data.puzzles, examples, side="right") - 1
        positions = np.arange(about.length, dtype=np.int32)
        rows = {
            "tokens": tokens,
            "targets": targets,
            "weight": is_asked.astype(np.float32),
            "position": np.tile(positions, (count, 1)),
            "document": np.zeros((count, about.length), np.int32),
            "identifier": data.identifiers[puzzle].astype(np.int32),
        }
        if data.iterations is not None:
            rows["iterations"] = data.iterations[examples].astype(np.int32)
        return rows

    @property
    def _splits(self) -> tuple[str, ...]:
        return ("train", *self.held_out)

    @property
    def _has_iterations(self) -> bool:
        return all(self._examples(split).iterations is not None for split in self._splits)

    @cached_property
    def _slots(self) -> np.ndarray:
        """Group of each row of training, and its number among the examples of a puzzle of it."""
        data = self._examples("train")
        first = data.groups[:-1]
        sizes = data.puzzles[first + 1] - data.puzzles[first]
        group = np.repeat(np.arange(len(first)), sizes)
        slot = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.stack([group, slot], axis=1)

    def _folder(self, split: str) -> Path:
        name = "train" if split == "train" else self.validation
        place = Path(self.path).expanduser()
        folder = place / str(name)
        if folder.is_dir():
            return folder
        if not place.is_dir():
            what = f"data.source.path is {self.path}, which is no folder"
            raise UserError(f"{what}; it is looked for from {Path.cwd()}")
        has = sorted(one.parent.name for one in place.glob(f"*/{ABOUT}"))
        found = f"it has {listing(has, 'and')}" if has else f"none of its folders has a {ABOUT}"
        if split == "train":
            raise UserError(f"data.source.path is {self.path}, without a folder train; {found}")
        raise UserError(
            f"data.source.validation is {name}, and {self.path} has no such folder; {found}, and "
            "data.source.validation=null holds out none"
        )

    def _about(self, split: str) -> Metadata:
        if split not in self._abouts:
            self._abouts[split] = _about(self._folder(split) / ABOUT)
        return self._abouts[split]

    def _examples(self, split: str) -> Examples:
        if split not in self._opened:
            folder, about = self._folder(split), self._about(split)
            self._opened[split] = _joined([_opened(folder, name, about) for name in about.sets])
        return self._opened[split]

    @cached_property
    def _abouts(self) -> dict[str, Metadata]:
        return {}

    @cached_property
    def _opened(self) -> dict[str, Examples]:
        return {}


def _asked(labels: np.ndarray, about: Metadata) -> np.ndarray:
    """Labels that are trained on: neither padding nor ignored."""
    is_padding = labels == about.padding
    if about.padding == about.end:
        # Where padding ends a text too, the first behind it is its end.
        is_padding[:, 1:] &= is_padding[:, :-1]
    return ~is_padding & (labels != about.ignored)


def _about(file: Path) -> Metadata:
    try:
        found = parse_json(file.read_text())
    except (OSError, ValueError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) else wrong
        raise UserError(f"{file} cannot be read: {why}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is {json.dumps(found)[:40]}; it is an object with seq_len, ...")

    def number(*names: str, absent: int | None = None) -> int | None:
        name = next((one for one in names if found.get(one) is not None), None)
        if name is None:
            return absent
        if type(found[name]) is not int:
            raise UserError(f"{file} has {found[name]!r} as {name}; it is a whole number")
        return found[name]

    sizes = {
        "seq_len": number("seq_len"),
        "vocab_size": number("vocab_size"),
        "num_puzzle_identifiers": number("num_puzzle_identifiers", "num_sequence_identifiers"),
    }
    if missing := [name for name, value in sizes.items() if value is None or value < 1]:
        raise UserError(f"{file} has no {listing(missing, 'and')}; each is a number above 0")
    length, vocab, identifiers = (value or 0 for value in sizes.values())
    sets = found.get("sets") or ["all"]
    if not isinstance(sets, list) or not all(isinstance(name, str) for name in sets):
        raise UserError(f"{file} has {json.dumps(sets)[:40]} as sets; it is a list of names")
    padding, end, ignored = (number(name) for name in ("pad_id", "eos_id", "ignore_label_id"))
    return Metadata(length, vocab, identifiers, padding or 0, end, ignored, tuple(sets))


def _opened(folder: Path, name: str, about: Metadata) -> Examples:
    """The arrays of one set."""
    inputs, labels = (_array(folder, name, field, about) for field in ("inputs", "labels"))
    puzzles, groups, identifiers = (
        _array(folder, name, field).astype(np.int64)
        for field in ("puzzle_indices", "group_indices", "puzzle_identifiers")
    )
    if len(inputs) != len(labels):
        raise UserError(
            f"{folder} has {len(inputs):,} inputs and {len(labels):,} labels in its set {name}; an "
            "example has both"
        )
    for field, begins, last, what in (
        ("puzzle_indices", puzzles, len(inputs), "examples"),
        ("group_indices", groups, len(puzzles) - 1, "puzzles"),
    ):
        is_whole = len(begins) > 1 and begins[0] == 0 and begins[-1] == last
        if not is_whole or (np.diff(begins) < 1).any():
            raise UserError(
                f"{folder} has {field} in its set {name} that do not divide {last:,} {what}: they "
                f"rise from 0 to {last}"
            )
    if len(identifiers) != len(puzzles) - 1:
        raise UserError(
            f"{folder} has {len(identifiers):,} puzzle_identifiers in its set {name}, and "
            f"{len(puzzles) - 1:,} puzzles; each has one"
        )
    if len(identifiers) and not 0 <= identifiers.min() <= identifiers.max() < about.identifiers:
        raise UserError(
            f"{folder} has puzzle_identifiers from {identifiers.min()} to {identifiers.max()} in "
            f"its set {name}; there are {about.identifiers}, from 0 on"
        )
    iterations = None
    if _file(folder, name, "iteration_targets").is_file():
        iterations = _array(folder, name, "iteration_targets")
        if len(iterations) == len(puzzles) - 1:  # one for all examples of a puzzle
            iterations = np.repeat(iterations, np.diff(puzzles))
        if len(iterations) != len(inputs):
            raise UserError(
                f"{folder} has {len(iterations):,} iteration_targets in its set {name}; it has "
                f"{len(inputs):,} examples"
            )
    begins = np.array([0, len(inputs)])
    return Examples([inputs], [labels], begins, puzzles, groups, identifiers, iterations)


def _joined(sets: list[Examples]) -> Examples:
    """One set behind another."""
    begins = np.cumsum([0, *(one.begins[-1] for one in sets)])
    firsts = np.cumsum([0, *(len(one.identifiers) for one in sets)])
    iterations = [one.iterations for one in sets if one.iterations is not None]
    ends = zip(sets, begins, firsts, strict=False)
    puzzles, groups = zip(
        *((s.puzzles[:-1] + b, s.groups[:-1] + f) for s, b, f in ends), strict=True
    )
    return Examples(
        inputs=[array for one in sets for array in one.inputs],
        labels=[array for one in sets for array in one.labels],
        begins=begins,
        puzzles=np.append(np.concatenate(puzzles), begins[-1]),
        groups=np.append(np.concatenate(groups), firsts[-1]),
        identifiers=np.concatenate([one.identifiers for one in sets]),
        iterations=np.concatenate(iterations) if len(iterations) == len(sets) else None,
    )


def _file(folder: Path, name: str, field: str) -> Path:
    flat = folder / f"{name}__{field}.npy"
    return flat if flat.is_file() else folder / name / f"{field}.npy"


def _array(folder: Path, name: str, field: str, about: Metadata | None = None) -> np.ndarray:
    """An array of whole numbers, memory-mapped: examples in rows, or one number for each."""
    file = _file(folder, name, field)
    if not file.is_file():
        both = f"{name}__{field}.npy, or {name}/{field}.npy"
        raise UserError(f"{folder} has no {field} of its set {name}: {both}")
    try:
        array = np.load(file, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError, EOFError):
        raise UserError(f"{file} is not a .npy file, the kind that numpy.save writes") from None
    shape = (len(array) if array.ndim else 0,) if about is None else (len(array), about.length)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != shape:
        what = "one for each" if about is None else f"rows of {about.length}, seq_len of {ABOUT}"
        raise UserError(
            f"{file} holds {array.dtype} of shape {array.shape}; it is of whole numbers, {what}"
        )
    return array
