"""A model's arrays under the names, and in the layout, of a Hugging Face checkpoint.

Arrays that have no such name (of a family that only Windlass has, of a residual, of adapters) have
their path in the model, with the number of the layer.

A family's table has names only: which way round a matrix lies follows from the axes it names,
which layer an array belongs to from its place in the stack, and the order of a head's entries from
the pairing of its rotary positions, which is half-split in every checkpoint elsewhere. Experts have
a tensor each where a name has `{expert}` in it, which lies as other matrices do; else those of a
layer are one tensor, in which a matrix has what it reads first.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from windlass.adapters import Adapted
from windlass.config.reading import report
from windlass.devices.axes import Placed, Stacked
from windlass.errors import UserError
from windlass.hub import fused
from windlass.layers.attention import Attention
from windlass.layers.embedding import TokenRows
from windlass.layers.head import ScoreHead
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection
from windlass.layers.rotary import halves, interleaved
from windlass.layers.stack import Stack
from windlass.networks.deltanet import GatedDeltaNet

Index = tuple[slice, ...]

TURNED = ("query", "key", "query_norm", "key_norm")  # parts of attention that rotary pairs order
EMBEDDING = "embedding.weight"
TABLES = (EMBEDDING, f"per_layer.{EMBEDDING}")  # with a row for each token

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
    parts = {name: bring() for array in whole for name, bring in array.out()}
    return {
        name: parts[its[0]] if len(its) == 1 else np.concatenate([parts[one] for one in its])
        for name, its in fused.groups(parts).items()
    }


def placed(
    model: Any,
    names: Mapping[str, str],
    tensors: Mapping[str, Sliceable],
    origin: str,
    fill: "Fill | None" = None,
) -> dict[str, jax.Array]:
    """Sharded arrays of an abstract model by path, each device reading its own part.

    Those of a residual are left out where there are none, since other checkpoints have one stream;
    and so are scores, which a language model has none of. `fill` makes the arrays, by path, that
    stand for one of the model's, before the next one is read.
    """
    expected = [
        array
        for array in arrays(model, names)
        if not array.is_added or any(name in tensors for name in array.names())
    ]
    shapes = {name: array.shape for array in expected for name in array.names()}
    tensors, problems = fused.split(tensors, shapes)
    used = set()
    for array in expected:
        for name in array.names():
            used.add(name)
            if name not in tensors:
                problems[fused.whole(name)] = "is missing"
            elif tuple(tensors[name].shape) != array.shape:
                there, here = list(tensors[name].shape), list(array.shape)
                problems[name] = f"is {there}; this model's is {here}"
    problems |= {name: "is nothing of this model's" for name in tensors if name not in used}
    if problems:
        raise UserError(report(list(problems.items()), origin))
    made = _as_it_is if fill is None else fill
    return {path: x for array in expected for path, x in made(array, tensors).items()}


class Layout(NamedTuple):
    """Layout of an array, one layer of it, in a checkpoint.

    Every group of axes is one axis there, and the groups stand in this order.
    """

    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    # Entries along the last axis, the first, that are interleaved pairs and half-split elsewhere.
    paired: int
    # of the last axis, by the sizes of each: elsewhere the group it is in has all of the first
    # part in front, then all of the second, and so on; empty: it has none
    parts: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[axis] for axis in group) for group in self.groups)

    def outward(self, x: np.ndarray) -> np.ndarray:
        x = halves(x, self.paired) if self.paired else x
        x = x.transpose([axis for group in self.groups for axis in group]).reshape(self.shape)
        return np.take(x, self._by_part, axis=self._last) if self.parts else x

    @property
    def _last(self) -> int:
        """Number of the group that has the last axis."""
        return next(i for i, group in enumerate(self.groups) if len(self.sizes) - 1 in group)

    @property
    def _by_part(self) -> np.ndarray:
        """Entries of that group in the order that they have elsewhere."""
        number = np.arange(self.shape[self._last]).reshape(-1, self.sizes[-1])
        cut = np.split(number, np.cumsum(self.parts)[:-1], axis=1)
        return np.concatenate([part.ravel() for part in cut])

    def part(self, tensor: Sliceable, index: Index) -> np.ndarray:
        """Part of a tensor that holds a part of the array."""
        there, sizes, cut = [], list(self.sizes), list(index)
        for group in self.groups:
            if not group:  # an axis of one entry there, and none here
                there.append(slice(None))
                continue
            first, *inner = group
            start, stop, _ = index[first].indices(self.sizes[first])
            width = math.prod(self.sizes[axis] for axis in inner)
            # A part of an axis inside a group lies scattered there, as do those of pairs and parts.
            if any(_is_cut(index[axis], self.sizes[axis]) for axis in inner) or (
                (self.paired and first == len(self.sizes) - 1)
                or (self.parts and len(self.sizes) - 1 in group)
            ):
                there.append(slice(None))
            else:
                there.append(slice(start * width, stop * width))
                sizes[first], cut[first] = stop - start, slice(None)
        order = [axis for group in self.groups for axis in group]
        x = np.asarray(tensor[tuple(there)])
        x = np.take(x, np.argsort(self._by_part), axis=self._last) if self.parts else x
        x = x.reshape([sizes[axis] for axis in order])
        x = x.transpose(np.argsort(order))
        return (interleaved(x, self.paired) if self.paired else x)[tuple(cut)]


class Array(NamedTuple):
    """Array of a model, and its name and layout in a checkpoint."""

    path: str  # in the model
    name: str  # elsewhere, with `{layer}` where it is stacked
    value: Any
    layers: range | None  # along the first axis; None: it is not stacked
    experts: range | None  # along the next axis, a tensor each; None: there are none, or in one
    layout: Layout
    is_added: bool  # of a connection with weights, or of scores: a language model has none
    is_fixed: bool  # never cast
    bits: int | None  # of each code, where it is of codes
    is_quantized: bool  # of an adapter that stands for the matrix, which is gone

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its tensor, or of each of its tensors."""
        return self.layout.shape

    @property
    def stack(self) -> tuple[int, ...]:
        """Numbers of tensors along its first axes: of layers, of experts."""
        return tuple(len(axis) for axis in (self.layers, self.experts) if axis is not None)

    def names(self) -> list[str]:
        if not self.stack:
            return [self.name]
        numbers = itertools.product(self.layers or [0], self.experts or [0])
        return [self.name.format(layer=layer, expert=expert) for layer, expert in numbers]

    def out(self) -> Iterator[tuple[str, Any]]:
        """Tensors by name, each brought to the host when it is called."""

        def tensor(place: tuple[int, ...]):
            whole = self.value
            for number in place:
                whole = _layer(whole, number) if isinstance(whole, jax.Array) else whole[number]
            # In one piece: safetensors writes memory as it lies.
            return np.ascontiguousarray(self.layout.outward(np.asarray(whole)))

        for place, name in zip(np.ndindex(*self.stack), self.names(), strict=True):
            yield name, lambda place=place: tensor(place)

    def each(self) -> Iterator["Array"]:
        """The array of each layer by itself, or this one, where it is of no layer."""
        if self.layers is None:
            yield self
            return
        place = self.value.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
        row = jax.ShapeDtypeStruct(self.value.shape[1:], self.value.dtype, sharding=place)
        for layer in self.layers:
            name = self.name.format(layer=layer, expert="{expert}")
            yield self._replace(name=name, value=row, layers=None)

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
        names, dtype = np.array(self.names()).reshape(self.stack), self.value.dtype
        if not self.stack:
            return self.layout.part(tensors[self.name], index).astype(dtype, copy=False)
        some, inner = names[index[: len(self.stack)]], index[len(self.stack) :]
        sizes = zip(inner, self.layout.sizes, strict=True)
        part = np.empty((*some.shape, *(len(range(*i.indices(n))) for i, n in sizes)), dtype)
        for place in np.ndindex(*some.shape):
            part[place] = self.layout.part(tensors[str(some[place])], inner)
        return part


Fill = Callable[[Array, Mapping[str, Sliceable]], dict[str, jax.Array]]


def _as_it_is(array: Array, tensors: Mapping[str, Sliceable]) -> dict[str, jax.Array]:
    return {array.path: array.filled(tensors)}


def arrays(model: Any, names: Mapping[str, str]) -> Iterator[Array]:
    """Arrays of a model, abstract or not, in the order of its leaves."""
    for path, value in jax.tree_util.tree_leaves_with_path(eqx.filter(model, _is_array)):
        node, layers, turned, is_added, is_own, words = model, None, None, False, False, []
        owner, parts = None, ()
        steps, along = iter(path), 0
        for step in steps:
            if isinstance(node, Stack):  # the step is to `kinds`, the next one to one of them
                kind = next(steps).idx
                layers = node.numbers(kind)
                words.append("{layer}")
                node = node.kinds[kind]
            else:
                words.append(jax.tree_util.keystr((step,), simple=True))
                if isinstance(node, Attention) and node.rotary and words[-1] in TURNED:
                    turned = node.rotary
                along += isinstance(node, Stacked)
                if isinstance(node, GatedDeltaNet):
                    parts = node.parts
                owner, node = node, _child(node, step)
                is_added |= isinstance(node, Connection | ScoreHead)
                is_own |= isinstance(node, Connection | Adapted | TokenRows)
        field, table_name = words[-1], _table_name(words, names)
        experts = None
        if along and table_name is not None and "{expert}" in table_name:
            experts, along = range(value.shape[layers is not None]), 0
        sizes = value.shape[(layers is not None) + (experts is not None) :]
        if table_name is None and names and not is_own:
            raise ValueError(f"the family's table has no name for {'.'.join(words)}")
        # What an adapter of queries reads is not turned, what it writes is.
        paired = 0
        if table_name and turned and _ends_in(owner, field, "head_dim"):
            paired = turned.rotated(sizes[-1]) if turned.pairing == "interleaved" else 0
        has_layout = table_name is not None or not is_own
        groups = _groups(owner, field, len(sizes), has_layout, along)
        own = parts if table_name and _ends_in(owner, field, "channels") else ()
        layout = Layout(tuple(sizes), groups, paired, own)
        yield Array(
            path=jax.tree_util.keystr(path, simple=True, separator="."),
            name=table_name or ".".join(words),
            value=value,
            layers=layers,
            experts=experts,
            layout=layout,
            is_added=is_added,
            is_fixed=isinstance(owner, Placed) and field in _kept(owner, table_name),
            bits=owner.code_bits.get(field) if isinstance(owner, Adapted) else None,
            is_quantized=isinstance(owner, Adapted) and owner.base is None,
        )


def _kept(owner: Placed, name: str | None) -> tuple[str, ...]:
    """Fields of a module that no file has in another type than the model.

    What is fixed and has a name elsewhere is in the files of others as all else.
    """
    return owner.rounded if name else (*owner.fixed, *owner.rounded)


def _table_name(path: list[str], names: Mapping[str, str]) -> str | None:
    """Checkpoint name of an array, by a table of names of arrays and of modules."""
    *owner, field = (word for word in path if word != "{layer}")
    whole, module = ".".join([*owner, field]), ".".join(owner)
    return names.get(whole) or (f"{names[module]}.{field}" if module in names else None)


def _ends_in(owner: Any, field: str, axis: str) -> bool:
    return isinstance(owner, Placed) and owner.axes[field][-1] == axis


def _child(node: Any, step: Any) -> Any:
    if isinstance(step, jax.tree_util.GetAttrKey):
        return getattr(node, step.name)
    return node[step.key if isinstance(step, jax.tree_util.DictKey) else step.idx]


def _groups(
    owner: Any, field: str, axes: int, has_layout: bool, experts: int
) -> tuple[tuple[int, ...], ...]:
    """Groups of axes, the first of which is of experts where those are one tensor."""
    if has_layout and isinstance(owner, Placed) and field in owner.groups:
        return owner.groups[field]
    if not has_layout or not isinstance(owner, Linear | Adapted | RMSNorm):
        return tuple((axis,) for axis in range(axes))
    if experts:
        behind = experts + owner.maps.get(field, 0)
        groups = (range(experts), range(experts, behind), range(behind, axes))
        return tuple(tuple(group) for group in groups if group)
    # A matrix is written with what it writes first; a bias is only that, as is a length of DoRA's
    # or the scale of a norm.
    reads = owner.maps.get(field, 0)
    groups = (tuple(range(reads, axes)), tuple(range(reads)))
    return groups if reads else groups[:1]


def _is_cut(part: slice, size: int) -> bool:
    return part.indices(size)[:2] != (0, size)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
