"""The teacher of a recipe: where its cache is, and what it is to hold."""

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from windlass import teacher_cache
from windlass.columns import Column
from windlass.config import section
from windlass.config.start import Start


@section
class Teacher:
    """A teacher's cache, which `windlass teach` writes: its likeliest tokens at every position."""

    shorthand: ClassVar[str] = "path"

    path: str  # the folder of the cache
    # the teacher that writes it: a model of the same vocabulary; null: the cache is there
    model: Start | None = None
    # tokens of the highest logits at every position; null: as the cache has it, 64 in a new one
    top_k: int | None = None
    # further tokens, uniform over the rest of the vocabulary; null: as the cache has it, or 0
    negatives: int | None = None
    # of the logits; null: as the cache has it, float16 in a new one
    dtype: Literal["float16", "float32"] | None = None
    # sequences in a shard, the most that a kill loses; null: as the cache has it, 1024 in a new one
    shard: int | None = None

    def __post_init__(self):
        least = {"top_k": 1, "negatives": 0, "shard": 1}
        low = [
            f"{name} is {value}; it must be {smallest} or more"
            for name, smallest in least.items()
            if (value := getattr(self, name)) is not None and value < smallest
        ]
        if "://" in self.path:
            low.append(f"path is {self.path}; it is a folder: that of a mounted bucket would do")
        if low:
            raise ValueError(*low)

    @property
    def folder(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def given(self) -> dict[str, Any]:
        """The keys that a cache must agree on."""
        keys = {name: getattr(self, name) for name in teacher_cache.USUAL}
        return {name: value for name, value in keys.items() if value is not None}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The same keys with those that are left open: as the cache has them, where it is there."""
        cache = teacher_cache.find(self.folder)
        known = {} if cache is None else {key: cache.about[key] for key in teacher_cache.USUAL}
        return teacher_cache.USUAL | known | self.given

    @property
    def columns(self) -> dict[str, Column]:
        keys = ("top_k", "negatives", "dtype")
        return teacher_cache.columns_of(*(self.settings[key] for key in keys))
