"""Safetensors files, written a tensor at a time; their size is known before they are."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from windlass.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
FLOATS = ("float64", "float32", "float16", "bfloat16")


class ShardTensor(NamedTuple):
    """Tensor to be written under a name; it is read when its turn comes, and cast."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    is_fixed: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self) -> np.ndarray:
        """The numbers in the dtype of the file; those that float16 has none for are refused."""
        x = self.read()
        with np.errstate(over="ignore"):  # which is looked for
            value = x.astype(self.dtype, copy=False)
        if self.dtype == np.float16 and np.isinf(value).any() and not np.isinf(x).any():
            raise UserError(
                f"{self.name} holds {np.abs(x).max():.3g}, and the largest number of float16 is "
                "65504; --dtype bfloat16 and --dtype float32 have larger ones"
            )
        return value

    def typed(self, dtype: str) -> "ShardTensor":
        """Cast to another dtype; integers and fixed arrays stay as they are."""
        new = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        is_cast = self.dtype.name in FLOATS and not self.is_fixed
        return self._replace(dtype=new) if is_cast else self


class Shard(NamedTuple):
    """Shard: a file of some tensors, one after the other."""

    file: str
    tensors: Sequence[ShardTensor]

    @property
    def size(self) -> int:
        return len(self._header()) + self.payload

    @property
    def payload(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    def write(self, folder: Path, tell: Callable[[int], None] = lambda size: None) -> None:
        """Write the file; `tell` is called with the bytes of each tensor as they are written."""
        with (folder / self.file).open("wb") as out:
            out.write(self._header())
            for tensor in self.tensors:
                value = tensor.cast()
                # As bytes: the buffer protocol does not know bfloat16.
                out.write(value.reshape(-1).view(np.uint8).data)
                tell(value.nbytes)

    def _header(self) -> bytes:
        about: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.size
            about[tensor.name] = {
                "dtype": WORDS[tensor.dtype.name],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(about, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that what follows is aligned
        return len(text).to_bytes(8, "little") + text


def divided(tensors: Iterable[ShardTensor], largest: int) -> list[Shard]:
    """Shards of at most `largest` bytes each, unless one tensor alone is larger."""
    groups: list[list[ShardTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    last = len(groups)
    return [
        Shard(f"model-{number:05}-of-{last:05}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def index(shards: Sequence[Shard]) -> str:
    """Index of several shards: the file of each tensor, as JSON."""
    total = sum(shard.payload for shard in shards)
    places = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    about = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(about, indent=2) + "\n"
