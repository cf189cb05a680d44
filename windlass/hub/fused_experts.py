"""Experts of a layer in one tensor, as `transformers` has them in memory, read as one each.

It concatenates gate and up along what they write: [experts, 2 × mlp, embed]. Published files of
Qwen3.5 have them so, and a model that came with them goes back as it came.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from windlass.hub.names import Array
from windlass.hub.shards import ShardTensor

SEPARATE = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
FUSED = re.compile(r".+\.experts\.(gate_up_proj|down_proj)")
# From the name of a map to the fused tensor, and to which of how many parts of it.
PARTS = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0, 2)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1, 2)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0, 1)),
}
MODULE, HUB = ".mlp.", ".block_sparse_moe."  # Mixtral's, in memory and in its files


class ExpertSlice:
    """The matrix of one expert, a part of a fused tensor."""

    def __init__(self, stored: Any, expert: int, part: int, parts: int):
        self._stored, self._expert, self._part = stored, expert, part
        _, rows, columns = stored.shape
        self.type, self.shape = stored.type, (rows // parts, columns)

    def __getitem__(self, index: Any) -> np.ndarray:
        rows, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        first = self._part * self.shape[0]
        here = slice(self._expert, self._expert + 1)
        return self._stored[(here, slice(first + start, first + stop), *rest)][0]


def is_fused(stored: Iterable[str]) -> bool:
    return any(map(FUSED.fullmatch, stored))


def separated(stored: Mapping[str, Any], arrays: Iterable[Array]) -> dict[str, Any]:
    """Tensors of a file, fused experts as one each where a model's names are of one each."""
    separate = [array for array in arrays if array.experts is not None]
    if not is_fused(stored) or not separate:
        return dict(stored)
    if any(HUB in array.name for array in separate):
        stored = {name.replace(MODULE, HUB): one for name, one in stored.items()}
    found = dict(stored)
    for array in separate:
        for name in array.names():
            fused, *part = _place(name)
            # Of another number of experts it is left, and said to be nothing of this model's.
            if fused in stored and stored[fused].shape[0] == len(array.experts or ()):
                found[name] = ExpertSlice(stored[fused], *part)
                found.pop(fused, None)
    return found


def joined(tensors: Iterable[ShardTensor]) -> list[ShardTensor]:
    """Tensors to be written, with the experts of a layer in one: the inverse of `separated`."""
    found, experts = [], dict[str, dict[tuple[int, int], ShardTensor]]()
    for one in tensors:
        whole, expert, part, _ = _place(one.name)
        if whole:
            experts.setdefault(whole, {})[expert, part] = one
        else:
            found.append(one)
    return found + [_joined(name, parts) for name, parts in experts.items()]


def _joined(name: str, parts: Mapping[tuple[int, int], ShardTensor]) -> ShardTensor:
    first, count = parts[0, 0], len({expert for expert, _ in parts})
    rows, columns = first.shape

    def read() -> np.ndarray:
        flat = np.concatenate([parts[key].read() for key in sorted(parts)])
        return flat.reshape(count, -1, columns)

    return first._replace(name=name, shape=(count, len(parts) // count * rows, columns), read=read)


def _place(name: str) -> tuple[str, int, int, int]:
    """Fused tensor of an expert's matrix, the expert, and the part of how many."""
    match = SEPARATE.fullmatch(name)
    if match is None or match[3] not in PARTS:
        return "", 0, 0, 1
    whole, part, parts = PARTS[match[3]]
    return f"{match[1]}.experts.{whole}", int(match[2]), part, parts
