"""An array of a program as one device holds it: its shape there, and the axes that split it."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType

from windlass.analysis.fusion import Value


def axes_at(variable: Any, dimensions: Sequence[int]) -> tuple[str, ...]:
    """The axes of the mesh over which some dimensions of an array are split."""
    spec = variable.aval.sharding.spec
    return tuple(name for i in dimensions if i < len(spec) for name in names(spec[i]))


def axes(variable: Any) -> frozenset[str]:
    return frozenset(name for entry in variable.aval.sharding.spec for name in names(entry))


def names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def is_automatic(variable: Any) -> bool:
    """Whether the compiler chooses how an array is split."""
    return AxisType.Auto in variable.aval.sharding.mesh.axis_types


def value(variable: Any) -> Value:
    return Value(math.prod(shape_there(variable)), itemsize(variable), axes(variable))


def shape_there(variable: Any) -> tuple[int, ...]:
    """The shape of an array on one device."""
    sharding = variable.aval.sharding
    if not any(sharding.spec):
        return shape(variable)
    sizes = sharding.mesh.shape
    ways = [math.prod(sizes[name] for name in names(entry)) for entry in sharding.spec]
    ways += [1] * (len(shape(variable)) - len(ways))
    return tuple(-(-size // way) for size, way in zip(shape(variable), ways, strict=True))


def is_of_words(shape: Sequence[int], vocab: int | None) -> bool:
    """Whether an array is logits, or a table with a row for each word.

    Where a vocabulary stands in a shape counts: rows may have as many places as there are words.
    """
    return vocab in shape[-1:] or len(shape) == 2 and shape[0] == vocab


def shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def itemsize(variable: Any) -> int:
    return variable.aval.dtype.itemsize


def dtype(variable: Any) -> str:
    return variable.aval.dtype.name
