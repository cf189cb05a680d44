"""Weights for a 4-bit base: each matrix is quantised as soon as it is read, a layer at a time."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from windlass import adapters
from windlass.checkpoint.fingerprint import named
from windlass.config.start import FrozenBase
from windlass.devices.axes import placements, stack_of
from windlass.hub.names import Array, Sliceable
from windlass.hub.quantized import FourBitTensor
from windlass.layers.linear import Linear
from windlass.quantization.four_bit import FourBitArrays, packed
from windlass.quantization.four_bit_linear import FourBitLinear
from windlass.quantization.scales import relative_errors


class BaseWeights:
    """The arrays of an abstract model whose maps may be in 4 bits, from matrices or from codes."""

    def __init__(self, model: PyTree):
        self.model = model
        leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_four_bit)
        self.maps: dict[str, FourBitLinear] = {
            jax.tree_util.keystr(path, simple=True, separator="."): node
            for path, node in leaves
            if _is_four_bit(node)
        }
        self.squares: dict[str, np.ndarray] = {}  # by map: of its errors, and of its weights
        self.quantized = self.as_stored = 0  # matrices

    @cached_property
    def plain(self) -> PyTree:
        """The abstract model with a matrix for each map in 4 bits, as its files have it."""
        if not self.maps:
            return self.model
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.model)
        merged, own = eqx.filter_eval_shape(adapters.merged, bare), named(self.model)
        mesh, shapes = _mesh(self.model), named(merged)
        places = [None] * len(shapes) if mesh is None else jax.tree.leaves(placements(merged, mesh))
        leaves = [
            own.get(path) or jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for (path, x), place in zip(shapes.items(), places, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(merged), leaves)

    def fill(self, array: Array, tensors: Mapping[str, Sliceable]) -> dict[str, jax.Array]:
        """The arrays, by path, that stand for an array of `plain` in files."""
        owner, _, field = array.path.rpartition(".")
        if field != "weight" or owner not in self.maps:
            return {array.path: array.filled(tensors)}
        layers = (self._of_files(owner, one, tensors) for one in array.each())
        return self._stacked(owner, list(layers))

    def converted(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Arrays of `plain`, by path, as those of the model; a matrix is given up once it is read.

        Those that are in 4 bits already stay.
        """
        given = dict(arrays)
        for owner, node in self.maps.items():
            if (matrix := given.pop(f"{owner}.weight", None)) is not None:
                layers = (self._quantized(owner, one) for one in _rows(matrix, node))
                given |= self._stacked(owner, list(layers))
        return given

    def facts(self) -> list[tuple[str, str]]:
        """Size of the base, and how far it is from the matrices that it stands for."""
        if not self.quantized + self.as_stored:
            return []
        kind = next(iter(self.maps.values())).kind
        count = f"{self.quantized + self.as_stored} matrices"
        size = f"{kind}, {count} of {_bits(self.maps.values()):.2f} bits a weight"
        if not self.quantized:
            return [("base", f"{size}, as the files have them")]
        stored = f", {self.as_stored} as the files have them" if self.as_stored else ""
        return [("base", f"{size}{stored}, {relative_errors(self.squares)}")]

    def _of_files(
        self, owner: str, array: Array, tensors: Mapping[str, Sliceable]
    ) -> FourBitArrays:
        """The arrays of one layer: codes that files have, or of the matrix that they have."""
        node, tensor = _layer(self.maps[owner]), tensors.get(array.name)  # None: each expert's own
        if not isinstance(tensor, FourBitTensor) or not _is_alike(node, tensor):
            return self._quantized(owner, array.filled(tensors))
        self.as_stored += 1
        return _taken(node, array, tensor)

    def _quantized(self, owner: str, matrix: jax.Array) -> FourBitArrays:
        node = _layer(self.maps[owner])
        like = _Map(node.reads, node.writes, _base(node), _places(node))
        arrays, squares = _quantize(matrix, like)
        self.quantized += 1
        self.squares[owner] = self.squares.get(owner, np.zeros(2)) + np.asarray(squares)
        return arrays

    def _stacked(self, owner: str, layers: list[FourBitArrays]) -> dict[str, jax.Array]:
        node, found = self.maps[owner], {}
        for field, each in zip(FourBitArrays._fields, zip(*layers, strict=True), strict=True):
            if (like := getattr(node, field)) is not None:
                one, *others = each
                found[f"{owner}.{field}"] = _stack([one, *others]) if like.ndim > one.ndim else one
        return found


class _Map(NamedTuple):
    """The static part of one layer's map, by which its quantiser is compiled once."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    base: FrozenBase
    places: tuple[NamedSharding | None, ...] | None  # of its arrays; None: on no mesh


@partial(jax.jit, static_argnums=1)
def _quantize(matrix: jax.Array, like: _Map) -> tuple[FourBitArrays, jax.Array]:
    """Codes and scales of a matrix, or of those of experts; Σ (found − weight)² and Σ weight²."""

    def quantize(matrix: jax.Array) -> tuple[FourBitArrays, jax.Array]:
        if matrix.ndim > len(like.reads + like.writes):
            arrays, squares = jax.vmap(quantize)(matrix)
            return arrays, jnp.sum(squares, axis=0)
        weight = matrix.astype(jnp.float32)
        node = FourBitLinear(Linear.of(like.reads, like.writes, weight), like.base)
        error = jnp.sum((node.merged().weight - weight) ** 2)
        squares = jnp.stack([error, jnp.sum(weight**2)])
        return FourBitArrays(node.codes, node.scales, node.zeros), squares

    if like.places is None:
        return quantize(matrix)
    # The compiler lays out what lies between, as at init: groups are cut otherwise than matrices.
    first, *_ = like.places
    assert first is not None
    whole = NamedSharding(first.mesh, PartitionSpec())
    places = (FourBitArrays(*like.places), whole)  # pyright: ignore
    sharded: Callable[..., Any] = jax.sharding.auto_axes(quantize, out_sharding=places)
    return sharded(matrix)


def _taken(node: FourBitLinear, array: Array, tensor: FourBitTensor) -> FourBitArrays:
    """The arrays of one layer as its file has them."""
    axis = len(node.reads) - 1
    scales, zeros = tensor.in_groups(_groups(node))

    def read(like: Any, stored: Any) -> jax.Array:
        own = array._replace(value=like, layout=array.layout._replace(sizes=like.shape))
        return own.filled({array.name: stored})

    place = array.value.sharding
    codes = jax.ShapeDtypeStruct(array.value.shape, jnp.uint8, sharding=place)
    return FourBitArrays(
        _pack(read(codes, tensor.codes), axis, node.codes.sharding),
        read(node.scales, scales),
        None if node.zeros is None else read(node.zeros, zeros),
    )


@partial(jax.jit, static_argnums=(1, 2))
def _pack(codes: jax.Array, axis: int, place: Any) -> jax.Array:
    pack: Callable[..., Any] = partial(packed, axis=axis)
    if place is not None:
        pack = jax.sharding.auto_axes(pack, out_sharding=place)
    return pack(codes)


def _is_alike(node: FourBitLinear, tensor: FourBitTensor) -> bool:
    """Return True if codes of a file mean what they would in a map, of as many groups or more."""
    has_zeros = (node.zeros is None) == (tensor.zeros is None)
    return node.kind == tensor.kind and has_zeros and _groups(node) % tensor.groups == 0


def _groups(node: FourBitLinear) -> int:
    """Groups of one output, in a map of one layer."""
    written = len(node.writes)
    return math.prod(node.scales.shape[-len(node.reads) - written : -written])


def _layer(node: FourBitLinear) -> FourBitLinear:
    """The abstract map of one layer, where maps are stacked; experts of a layer stay together."""
    stack = len(stack_of(node)[:1])

    def row(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        place = x.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec(*place.spec[stack:]))
        return jax.ShapeDtypeStruct(x.shape[stack:], x.dtype, sharding=place)

    return jax.tree.map(row, node)


def _base(node: FourBitLinear) -> FrozenBase:
    """The settings by which a map of one layer is made."""
    axis = -len(node.writes) - 1
    size = 2 * node.codes.shape[axis] // node.scales.shape[axis]
    scales: Any = node.scales.dtype.name
    return FrozenBase(kind=node.kind, group=size, zeros=node.zeros is not None, scales=scales)


def _places(node: FourBitLinear) -> tuple[Any, ...] | None:
    arrays = (node.codes, node.scales, node.zeros)
    places = tuple(None if x is None else x.sharding for x in arrays)
    return None if places[0] is None else places


def _rows(matrix: jax.Array, node: FourBitLinear) -> Iterator[jax.Array]:
    """The matrix of each layer, where maps are stacked."""
    if not stack_of(node):
        yield matrix
        return
    for index in range(len(matrix)):
        yield _row(matrix, jnp.int32(index))


@jax.jit
def _row(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


@jax.jit
def _stack(each: list[jax.Array]) -> jax.Array:
    return jnp.stack(each)


def _bits(maps: Any) -> float:
    stored = weights = 0
    for node in maps:
        arrays = [x for x in (node.codes, node.scales, node.zeros) if x is not None]
        stored += sum(8 * x.size * x.dtype.itemsize for x in arrays)
        weights += 2 * node.codes.size
    return stored / weights


def _mesh(model: PyTree) -> Any:
    places = (x.sharding for x in jax.tree.leaves(model))
    return next((place.mesh for place in places if isinstance(place, NamedSharding)), None)


def _is_four_bit(node: Any) -> bool:
    return isinstance(node, FourBitLinear)
