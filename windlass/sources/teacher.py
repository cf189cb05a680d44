"""A teacher's cache alone: its rows have the tokens, too, and need no other data."""

import hashlib
import os
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from windlass.columns import Column, ColumnReader
from windlass.config import section
from windlass.errors import UserError
from windlass.sources import Blocks, Numbered
from windlass.teacher_cache import TeacherCache, whole


@section
class Source(Blocks):
    """A teacher's cache as the data set: sequences with what `windlass teach` wrote beside them."""

    path: str  # the folder of the cache
    split: Literal["train", "validation", "test"] = "train"  # of the cache: whose rows

    def described(self) -> dict[str, Any]:
        path = os.path.abspath(os.path.expanduser(self.path))
        return Numbered.described(self) | {"path": path}

    @property
    def total(self) -> int:
        return sum(rows for _, rows in self._parts)

    @property
    def columns(self) -> dict[str, Column]:
        return self.cache.columns

    @property
    def vocab(self) -> int:
        return self.cache.about["vocab"]

    def fingerprint(self) -> str:
        content = f"{self.cache.fingerprint} {self.split} {len(self)}"
        return hashlib.sha256(content.encode()).hexdigest()

    def check_vocabulary(self, described: str) -> None:
        theirs = self.cache.about["tokenizer"]
        if theirs not in (None, described):
            raise UserError(
                f"data.source.path is {self.path}, a cache whose tokenizer is {theirs}; that of "
                f"this recipe is {described}: to a teacher these are other tokens"
            )

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        batch = {name: column.padded(len(numbers)) for name, column in self.columns.items()}
        ends = list(accumulate(rows for _, rows in self._parts))
        which = np.searchsorted(ends, numbers, side="right")
        for part, (name, rows) in enumerate(self._parts):
            here = which == part
            own = numbers[here] - (ends[part] - rows)
            for column, values in self._readers[name].rows(own).items():
                batch[column][here] = values
        return batch

    @cached_property
    def cache(self) -> TeacherCache:
        cache = whole(Path(self.path).expanduser(), "data.source.path")
        if not any(name.startswith(f"{self.split}-") for name in cache.parts):
            has = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in cache.parts))
            raise UserError(
                f"data.source.split is {self.split}, and the cache in {self.path} has {has}"
            )
        return cache

    @property
    def _parts(self) -> list[tuple[str, int]]:
        parts = self.cache.parts.items()
        return [(name, rows) for name, rows in parts if name.startswith(f"{self.split}-")]

    @cached_property
    def _readers(self) -> dict[str, ColumnReader]:
        return {name: ColumnReader(self.cache.stored(name)) for name, _ in self._parts}
