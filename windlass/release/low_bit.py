"""The tensors of a quantized model, as small as it was made to be: packed codes, F16 factors."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from windlass.adapters import Adapted, plain
from windlass.hub import packed
from windlass.hub.names import Array, arrays
from windlass.hub.shards import ShardTensor
from windlass.hub.weights import in_order
from windlass.release import merge

FACTORS = "float16"  # of the tables, scales and factors of a quantizer


class StoredBits(NamedTuple):
    """Bits that files have for the weights of quantized linear maps."""

    stored: int
    weights: int

    @property
    def per_weight(self) -> float:
        return self.stored / self.weights


def tensors(model: Any, names: Mapping[str, str]) -> list[ShardTensor]:
    """Tensors of a model with its adapters; what is not of a quantizer is as it is."""
    unordered = [one for array in arrays(model, names) for one in _tensors(array)]
    return sorted(unordered, key=lambda one: in_order(one.name))


def bits(model: Any, names: Mapping[str, str]) -> StoredBits:
    """Bits of all quantized maps, without their biases."""
    stored = sum(
        8 * tensor.size
        for array in arrays(model, names)
        if array.is_quantized and not array.path.endswith(".bias")
        for tensor in _tensors(array)
    )
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_adapted)
    maps = {
        jax.tree_util.keystr(path, simple=True, separator=".") + ".weight"
        for path, node in leaves
        if _is_adapted(plain(node))  # what is left with all off stands for the matrix
    }
    whole = arrays(merge.abstract(model), names)
    return StoredBits(stored, sum(one.value.size for one in whole if one.path in maps))


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)


def has_codes(model: Any, names: Mapping[str, str]) -> bool:
    return any(array.bits is not None for array in arrays(model, names))


def _tensors(array: Array) -> list[ShardTensor]:
    dtype = np.dtype(array.value.dtype)
    return [_tensor(array, name, dtype, read) for name, read in array.out()]


def _tensor(array: Array, name: str, dtype: np.dtype, read: Any) -> ShardTensor:
    if array.bits is not None:
        shape = (packed.size(math.prod(array.shape), array.bits),)
        codes = partial(_packed, read, array.bits)
        return ShardTensor(packed.name(name, array.bits), shape, np.dtype(np.uint8), codes, True)
    tensor = ShardTensor(name, array.shape, dtype, read, array.is_fixed)
    # Of what follows, nothing casts it to another.
    return tensor.typed(FACTORS)._replace(is_fixed=True) if array.is_quantized else tensor


def _packed(read: Any, bits: int) -> np.ndarray:
    return packed.pack(read(), bits)
