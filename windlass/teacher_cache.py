"""Teacher caches: the logits that a teacher gave the likeliest tokens at every position of rows.

A cache is a folder. `teacher.json` says what it is of, signed; `SPLIT-PART/00000` is a shard of its
rows, with `COLUMN.npy` for each column and the hash of each; `files.json` has the hashes of all
files, and is there once all shards are. A shard is published at once or not at all: a kill loses
the one that is being written, and what is in the others follows from nothing but their rows.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass import files, seal
from windlass.columns import LENGTH, Column, StoredColumn, shard_folder
from windlass.errors import UserError

FORMAT = 1  # raised whenever the same teacher would be cached differently
ABOUT = "teacher.json"
IDS, LOGITS, LOG_Z = "teacher_ids", "teacher_logits", "teacher_log_z"
USUAL: dict[str, Any] = {"top_k": 64, "negatives": 0, "dtype": "float16", "shard": 1024}


def columns_of(top_k: int, negatives: int, dtype: str) -> dict[str, Column]:
    """Columns that a teacher adds to a batch, for every position and the token that comes next.

    Candidates are the `top_k` highest logits, descending, then `negatives` other ids, uniform over
    the rest of the vocabulary. Logits are raw, of temperature 1; −inf marks a candidate that is
    none. The last column is log Σ exp z over the whole vocabulary: the mass of all that is no
    candidate is 1 − Σ exp(z_c − log_z).
    """
    candidates = top_k + negatives
    return {
        IDS: Column(np.int32, (LENGTH, candidates)),
        LOGITS: Column(dtype, (LENGTH, candidates)),
        LOG_Z: Column(np.float32, (LENGTH,)),
    }


def written(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Columns as `teacher.json` has them."""
    return {name: [str(x.dtype), list(x.axes), x.padding] for name, x in columns.items()}


class CacheShard(NamedTuple):
    """Rows of a part, from `first` to `stop`."""

    part: str  # such as train-0: the first source in the train split
    number: int
    first: int
    stop: int

    @property
    def name(self) -> str:
        return str(shard_folder(Path(self.part), self.number))


class TeacherCache(NamedTuple):
    """A cache, whole or in the making."""

    folder: Path
    about: dict[str, Any]  # teacher.json

    @property
    def columns(self) -> dict[str, Column]:
        """Columns of a row, with a number for every axis."""
        stored = self.about["columns"].items()
        return {name: Column(dtype, tuple(axes), fill) for name, (dtype, axes, fill) in stored}

    @property
    def parts(self) -> dict[str, int]:
        """The number of rows of each part, by its name."""
        return {name: one["rows"] for name, one in self.about["rows"].items()}

    @property
    def rows(self) -> int:
        return sum(self.parts.values())

    @property
    def row_bytes(self) -> int:
        shapes = ((column.dtype, column.shape(1)) for column in self.columns.values())
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)

    @property
    def shards(self) -> list[CacheShard]:
        size = self.about["shard"]
        return [
            CacheShard(part, first // size, first, min(first + size, rows))
            for part, rows in self.parts.items()
            for first in range(0, rows, size)
        ]

    @property
    def missing(self) -> list[CacheShard]:
        """Shards that are still to be written."""
        return [one for one in self.shards if not (self.folder / one.name / seal.NAME).is_file()]

    @property
    def fingerprint(self) -> str:
        """Content hash of a whole cache."""
        return hashlib.sha256((self.folder / seal.NAME).read_bytes()).hexdigest()

    def stored(self, part: str) -> dict[str, StoredColumn]:
        """The columns of a part, wherever their rows are."""
        return {
            name: StoredColumn(column, self.folder / part / f"{name}.npy", self.about["shard"])
            for name, column in self.columns.items()
        }

    def begin(self) -> None:
        """Write what the cache is of, and remove what a kill left of a shard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"*{files.PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        if (self.folder / ABOUT).is_file():
            return
        if others := sorted(path.name for path in self.folder.iterdir()):
            raise UserError(
                f"{self.folder} has other files, such as {others[0]}, and a cache goes to a folder "
                "of its own"
            )
        seal.write_signed(self.folder / ABOUT, self.about)

    def write(self, shard: CacheShard, columns: Mapping[str, np.ndarray]) -> None:
        """Publish a shard: it is there whole, or not at all."""
        partial = self.folder / f"{shard.part}-{shard.number:05d}{files.PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, column in self.columns.items():
            little = column.dtype.newbyteorder("<")
            np.save(partial / f"{name}.npy", np.ascontiguousarray(columns[name], little))
        seal.seal(partial)
        files.publish(partial, self.folder / shard.name)

    def finish(self) -> None:
        """Seal the cache, once all shards are there: their hashes are not computed again."""
        hashes = {ABOUT: _hash(self.folder / ABOUT)}
        for shard in self.shards:
            own = self.folder / shard.name / seal.NAME
            of_shard = {**seal.hashes(own), seal.NAME: _hash(own)}
            hashes |= {f"{shard.name}/{name}": value for name, value in of_shard.items()}
        content = json.dumps(seal.signed({"files": hashes}))
        if not is_sealed(self.folder) or (self.folder / seal.NAME).read_text() != content:
            files.write(self.folder / seal.NAME, content)


def is_cache(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def is_sealed(folder: Path) -> bool:
    return (folder / seal.NAME).is_file()


def find(folder: Path) -> TeacherCache | None:
    """The cache in a folder, whole or not; None where there is none."""
    try:
        about = seal.opened(folder / ABOUT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise UserError(
            f"{folder / ABOUT} is not as it was written; put it back from a copy, or make the "
            "cache again in another folder"
        ) from None
    if about["format"] != FORMAT:
        raise UserError(
            f"{folder} is a teacher's cache of format {about['format']}, and this version of "
            f"windlass reads {FORMAT}; make it again in another folder"
        )
    return TeacherCache(folder, about)


def whole(folder: Path, key: str) -> TeacherCache:
    """The cache that a key names, or a refusal where it is not there, or not whole."""
    cache = find(folder)
    if cache is None:
        raise UserError(
            f"{key} is {folder}, where there is no teacher's cache; `windlass teach RECIPE` writes "
            "it"
        )
    missing = cache.missing
    if missing or not is_sealed(folder):
        there = len(cache.shards) - len(missing)
        raise UserError(
            f"{key} is {folder}, a teacher's cache with {there:,} of its {len(cache.shards):,} "
            "shards; `windlass teach RECIPE` writes the others"
        )
    return cache


def damaged(folder: Path) -> list[str]:
    """Files that are missing or not as they were written; of an unfinished cache, of its shards."""
    if is_sealed(folder):
        return seal.broken(folder)
    try:
        cache = find(folder)
    except UserError:
        cache = None
    if cache is None:
        return [ABOUT]
    there = [shard.name for shard in cache.shards if (folder / shard.name).is_dir()]
    return [f"{name}/{file}" for name in there for file in seal.broken(folder / name)]


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
