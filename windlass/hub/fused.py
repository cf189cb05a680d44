"""Fused tensors: the matrices of several maps as one tensor of a checkpoint, one below the other.

A family's table names such a part by its number, as in `self_attn.qkv_proj[1]`: the tensor is split
where it is read, and joined where it is written.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from windlass.hub.shards import ShardTensor

PART = re.compile(r"(.+)\[(\d+)\](.*)")


def whole(name: str) -> str:
    """Name of the tensor that a name is a part of, or its own."""
    match = PART.fullmatch(name)
    return name if match is None else match[1] + match[3]


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Parts of each tensor by its name, in order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(whole(name), []).append(name)
    return {name: sorted(parts, key=_number) for name, parts in found.items()}


def joined(tensors: Iterable[ShardTensor]) -> list[ShardTensor]:
    """Tensors to be written, of parts the one that they make."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [
        _joined(name, [by_name[part] for part in parts]) for name, parts in groups(by_name).items()
    ]


def split(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors of a checkpoint with those of `shapes` that are parts, and what is wrong, by name."""
    found, problems = dict(tensors), {}
    for name, parts in groups(shapes).items():
        if parts == [name] or name not in tensors:
            continue
        there, here = tuple(tensors[name].shape), _shape([shapes[part] for part in parts])
        if there != here:
            problems[name] = f"is {list(there)}; this model's is {list(here)}"
        begin, stored = 0, found.pop(name)
        for part in parts:
            found[part] = RowSlice(stored, begin, shapes[part])
            begin += shapes[part][0]
    return found, problems


class RowSlice:
    """Rows of a tensor, read a part at a time."""

    def __init__(self, stored: Any, begin: int, shape: tuple[int, ...]):
        self._stored, self._begin, self.shape = stored, begin, shape

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = first.indices(self.shape[0])
        return self._stored[(slice(self._begin + start, self._begin + stop), *rest)]


def _number(name: str) -> int:
    match = PART.fullmatch(name)
    return 0 if match is None else int(match[2])


def _joined(name: str, parts: Sequence[ShardTensor]) -> ShardTensor:
    if len(parts) == 1:
        return parts[0]

    def read() -> np.ndarray:
        return np.concatenate([part.read() for part in parts])

    return parts[0]._replace(name=name, shape=_shape([one.shape for one in parts]), read=read)


def _shape(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in parts), *parts[0][1:])
