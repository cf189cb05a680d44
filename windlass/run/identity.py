"""The identity of a recipe: the keys that make it another run, and their hash."""

import hashlib
import json
from typing import Any

from windlass.config import tree
from windlass.run import Run

# What makes two runs different runs; where and how fast they go does not.
_OURS = (
    *("model", "start", "residual", "adapter", "tokenizer"),
    *("data", "objective", "helpers", "optim", "train"),
)
ONE_STREAM = {"kind": "plain"}  # of a residual: the default
_NOT_OURS = {
    "data": ("cache", "workers", "prefetch"),
    "train": (
        *("steps", "epochs", "patience", "evaluate_every", "best", "sample", "sampling"),
        *("microbatch", "remat", "layers_per_loop", "deterministic", "strict"),
    ),
}
# Keys of a source that decide nothing where it is no stream, and of one that is: how much is kept.
_OF_STREAMS, _KEPT = ("stream", "part_tokens", "keep_parts"), ("keep_parts",)
# Keys that are left out where they are null: runs of before keep their hash.
LATER = ("teacher", "base")


def essence(run: Run) -> dict[str, Any]:
    """The keys that decide what is computed: the same essence finds the same folder."""
    return essential(tree(run))


def essential(recipe: dict[str, Any]) -> dict[str, Any]:
    """Essence of a recipe that is not read."""
    return {
        name: _without(recipe[name], _NOT_OURS.get(name, ()))
        for name in _OURS
        if recipe.get(name) and recipe[name] != ONE_STREAM
    }


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(section, list):  # of adapters
        return section
    return {
        key: _decisive(x) if key in ("source", "mixture") else _settled(x)
        for key, x in section.items()
        if key not in keys and not _is_later(key, x)
    }


def _settled(value: Any) -> Any:
    """A value without the keys, at any depth, that were added later and are null."""
    if not isinstance(value, dict):
        return value
    return {key: _settled(x) for key, x in value.items() if not _is_later(key, x)}


def _is_later(key: str, value: Any) -> bool:
    return key in LATER and value is None


def _decisive(source: Any) -> Any:
    """The keys of a source, or of several, that decide which documents there are."""
    if isinstance(source, list):
        return [_decisive(one) for one in source]
    if not isinstance(source, dict):
        return source
    idle = _KEPT if source.get("stream") else _OF_STREAMS
    return {key: x for key, x in source.items() if key not in idle}


def digest(run: Run) -> str:
    text = json.dumps(essence(run), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
