"""Per-device arrays: the shape of one shard, and the mesh axes that an array is sharded over."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType

from windlass.analysis.fusion import Value


def axes_at(variable: Any, dimensions: Sequence[int]) -> tuple[str, ...]:
    """The mesh axes that some dimensions of an array are sharded over."""
    spec = variable.aval.sharding.spec
    return tuple(name for i in dimensions if i < len(spec) for name in names(spec[i]))


def axes(variable: Any) -> frozenset[str]:
    return frozenset(name for entry in variable.aval.sharding.spec for name in names(entry))


def names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_automatic(variable: Any) -> bool:
    """Return True if the compiler chooses the sharding of an array (axes of type Auto)."""
    return AxisType.Auto in variable.aval.sharding.mesh.axis_types


def value(variable: Any) -> Value:
    return Value(math.prod(device_shape(variable)), itemsize(variable), axes(variable))


def device_shape(variable: Any) -> tuple[int, ...]:
    """Shard shape of an array, on one device."""
    sharding = variable.aval.sharding
    if not any(sharding.spec):
        return shape(variable)
    sizes = sharding.mesh.shape
    ways = [math.prod(sizes[name] for name in names(entry)) for entry in sharding.spec]
    ways += [1] * (len(shape(variable)) - len(ways))
    return tuple(-(-size // way) for size, way in zip(shape(variable), ways, strict=True))


def has_vocab_axis(shape: Sequence[int], vocab: int | None) -> bool:
    """Return True if a shape has the vocabulary axis of logits, or of an embedding table.

    Where it stands in the shape counts: a sequence may be as long as the vocabulary is large.
    """
    return vocab in shape[-1:] or len(shape) == 2 and shape[0] == vocab


def shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def itemsize(variable: Any) -> int:
    return variable.aval.dtype.itemsize


def dtype(variable: Any) -> str:
    return variable.aval.dtype.name
