"""A model's arrays under the names, and in the layout, of a Hugging Face checkpoint.

Arrays that have no such name (of a family that only Windlass has, of a residual, of adapters) have
their path in the model, with the number of the layer.

A family's table has names only: which way round a matrix lies follows from the axes it names,
which layer an array belongs to from its place in the stack, and the order of a head's entries from
the pairing of its rotary positions, which is half-split in every checkpoint elsewhere.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from windlass.adapters import Adapted
from windlass.config.reading import report
from windlass.devices.axes import Placed
from windlass.errors import UserError
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.residual import Connection
from windlass.layers.rotary import halves, interleaved
from windlass.layers.stack import Stack

Index = tuple[slice, ...]

TURNED = ("query", "key", "query_norm", "key_norm")  # parts of attention that rotary pairs order
HEAD = "output.weight"  # absent where the head shares the embedding's weight
EMBEDDING = "embedding.weight"

_layer = jax.jit(partial(jax.lax.dynamic_index_in_dim, keepdims=False))


@runtime_checkable
class Sliceable(Protocol):
    """A tensor of a checkpoint, of which a part can be had: an array, or a part of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def to_tensors(model: Any, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Tensors of a model, or of a tree like it (its gradient), by their checkpoint names."""
    whole = [one._replace(value=np.asarray(one.value)) for one in arrays(model, names)]
    return {name: bring() for array in whole for name, bring in array.out()}


def placed(
    model: Any, names: Mapping[str, str], tensors: Mapping[str, Sliceable], origin: str
) -> dict[str, jax.Array]:
    """Sharded arrays of an abstract model by path, each device reading its own part.

    Those of a residual are left out where there are none: other checkpoints have one stream.
    """
    expected = [
        array
        for array in arrays(model, names)
        if not array.is_residual or any(name in tensors for name in array.names())
    ]
    problems, used = {}, set()
    for array in expected:
        for name in array.names():
            used.add(name)
            if name not in tensors:
                problems[name] = "is missing"
            elif tuple(tensors[name].shape) != array.shape:
                there, here = list(tensors[name].shape), list(array.shape)
                problems[name] = f"is {there}; this model's is {here}"
    problems |= {name: "is nothing of this model's" for name in tensors if name not in used}
    if problems:
        raise UserError(report(list(problems.items()), origin))
    return {array.path: array.filled(tensors) for array in expected}


class Layout(NamedTuple):
    """Layout of an array, one layer of it, in a checkpoint.

    Every group of axes is one axis there, and the groups stand in this order.
    """

    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    paired: bool  # interleaved pairs along the last axis, which are half-split elsewhere

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.groups)

    def outward(self, x: np.ndarray) -> np.ndarray:
        x = halves(x) if self.paired else x
        return x.transpose([axis for group in self.groups for axis in group]).reshape(self.shape)

    def part(self, tensor: Sliceable, index: Index) -> np.ndarray:
        """Part of a tensor that holds a part of the array."""
        there, sizes, cut = [], list(self.sizes), list(index)
        for group in self.groups:
            first, *inner = group
            start, stop, _ = index[first].indices(self.sizes[first])
            width = math.prod(self.sizes[axis] for axis in inner)
            # A part of an axis inside a group lies scattered there, as does a part of pairs.
            if any(_is_cut(index[axis], self.sizes[axis]) for axis in inner) or (
                self.paired and first == len(self.sizes) - 1
            ):
                there.append(slice(None))
            else:
                there.append(slice(start * width, stop * width))
                sizes[first], cut[first] = stop - start, slice(None)
        order = [axis for group in self.groups for axis in group]
        x = np.asarray(tensor[tuple(there)]).reshape([sizes[axis] for axis in order])
        x = x.transpose(np.argsort(order))
        return (interleaved(x) if self.paired else x)[tuple(cut)]


class Array(NamedTuple):
    """Array of a model, and its name and layout in a checkpoint."""

    path: str  # in the model
    name: str  # elsewhere, with `{layer}` where it is stacked
    value: Any
    layers: range | None  # along the first axis; None: it is not stacked
    layout: Layout
    is_residual: bool  # of a connection with weights, which no family's table has names for
    is_fixed: bool  # never cast
    bits: int | None  # of each code, where it is of codes
    is_quantized: bool  # of an adapter that stands for the matrix, which is gone

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its tensor, or of each of its tensors."""
        return self.layout.shape

    def names(self) -> list[str]:
        if self.layers is None:
            return [self.name]
        return [self.name.format(layer=layer) for layer in self.layers]

    def out(self) -> Iterator[tuple[str, Any]]:
        """Tensors by name, each brought to the host when it is called."""

        def tensor(number: int):
            whole = self.value
            if self.layers is not None:
                whole = _layer(whole, number) if isinstance(whole, jax.Array) else whole[number]
            # In one piece: safetensors writes memory as it lies.
            return np.ascontiguousarray(self.layout.outward(np.asarray(whole)))

        for number, name in enumerate(self.names()):
            yield name, lambda number=number: tensor(number)

    def filled(self, tensors: Mapping[str, Sliceable]) -> jax.Array:
        cache: dict[tuple, np.ndarray] = {}  # devices that hold the same part share one reading
        shape, dtype = self.value.shape, self.value.dtype

        def part(index: Index | None) -> np.ndarray:
            index = index or (slice(None),) * len(shape)
            key = tuple(one.indices(size) for one, size in zip(index, shape, strict=True))
            if key not in cache:
                cache[key] = self._part(tensors, index)
            return cache[key]

        place = self.value.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(shape, place, part, dtype=dtype)

    def _part(self, tensors: Mapping[str, Sliceable], index: Index) -> np.ndarray:
        names, dtype = self.names(), self.value.dtype
        if self.layers is None:
            return self.layout.part(tensors[names[0]], index).astype(dtype, copy=False)
        some, inner = names[index[0]], index[1:]
        sizes = zip(inner, self.layout.sizes, strict=True)
        part = np.empty((len(some), *(len(range(*i.indices(n))) for i, n in sizes)), dtype)
        for number, name in enumerate(some):
            part[number] = self.layout.part(tensors[name], inner)
        return part


def arrays(model: Any, names: Mapping[str, str]) -> Iterator[Array]:
    """Arrays of a model, abstract or not, in the order of its leaves."""
    for path, value in jax.tree_util.tree_leaves_with_path(eqx.filter(model, _is_array)):
        node, layers, turned, is_residual, is_own, words = model, None, False, False, False, []
        owner: Any = None
        steps = iter(path)
        for step in steps:
            if isinstance(node, Stack):  # the step is to `kinds`, the next one to one of them
                kind = next(steps).idx
                layers = range(kind, node.layers, len(node.kinds))
                words.append("{layer}")
                node = node.kinds[kind]
            else:
                words.append(jax.tree_util.keystr((step,), simple=True))
                if isinstance(node, Attention) and node.rotary and words[-1] in TURNED:
                    turned = node.rotary.pairing == "interleaved"
                owner, node = node, _child(node, step)
                is_residual |= isinstance(node, Connection)
                is_own |= isinstance(node, Connection | Adapted)
        field, sizes = words[-1], value.shape if layers is None else value.shape[1:]
        table_name = _table_name(words, names)
        if table_name is None and names and not is_own:
            raise ValueError(f"the family's table has no name for {'.'.join(words)}")
        # What an adapter of queries reads is not turned, what it writes is.
        paired = bool(table_name) and turned and _ends_in_heads(owner, field)
        has_layout = table_name is not None or not is_own
        layout = Layout(tuple(sizes), _groups(owner, field, len(sizes), has_layout), paired)
        yield Array(
            path=jax.tree_util.keystr(path, simple=True, separator="."),
            name=table_name or ".".join(words),
            value=value,
            layers=layers,
            layout=layout,
            is_residual=is_residual,
            is_fixed=isinstance(owner, Placed) and field in (*owner.fixed, *owner.rounded),
            bits=owner.code_bits.get(field) if isinstance(owner, Adapted) else None,
            is_quantized=isinstance(owner, Adapted) and owner.base is None,
        )


def _table_name(path: list[str], names: Mapping[str, str]) -> str | None:
    """Checkpoint name of an array, by a table of names of arrays and of modules."""
    *owner, field = (word for word in path if word != "{layer}")
    whole, module = ".".join([*owner, field]), ".".join(owner)
    return names.get(whole) or (f"{names[module]}.{field}" if module in names else None)


def _ends_in_heads(owner: Any, field: str) -> bool:
    return isinstance(owner, Placed) and owner.axes[field][-1] == "head_dim"


def _child(node: Any, step: Any) -> Any:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, step.name)
    return node[step.key if isinstance(step, jax.tree_util.DictKey) else step.idx]


def _groups(owner: Any, field: str, axes: int, has_layout: bool) -> tuple[tuple[int, ...], ...]:
    if not has_layout or not isinstance(owner, Linear | Adapted):
        return tuple((axis,) for axis in range(axes))
    # A matrix is written with what it writes first; a bias is only that, as is a length of DoRA's.
    reads = owner.maps.get(field, 0)
    groups = (tuple(range(reads, axes)), tuple(range(reads)))
    return groups if reads else groups[:1]


def _is_cut(part: slice, size: int) -> bool:
    return part.indices(size)[:2] != (0, size)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
