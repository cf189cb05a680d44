"""Adapters fitted to the matrices that they replace: on the host, layer by layer, before step 0."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float
from rich.console import Console

from windlass import adapters
from windlass.adapters import Adapted, BaseAdapter
from windlass.checkpoint.fingerprint import named
from windlass.data.progress import progress
from windlass.devices.axes import placements, stack_of
from windlass.layers.linear import Linear, LinearMap
from windlass.processes import hosts
from windlass.program.abstract import abstract_model
from windlass.program.built import Built, InitialArrays
from windlass.program.programs import RUN_ONCE
from windlass.quantization.scales import relative_errors
from windlass.telemetry.compiles import Program

Arrays = dict[int, dict[str, Array]]  # as InitialArrays
Fields = dict[str, np.ndarray]


def fitted(
    built: Built, initial: InitialArrays, others: Mapping[str, Adapted], console: Console
) -> tuple[InitialArrays, list[tuple[str, str]]]:
    """Initial arrays with those of adapters that are fitted, and facts of these.

    Maps whose arrays are among the initial ones keep them. `others` are maps, by path, as another
    run adapted them, for an adapter that starts from such. A matrix that its adapter drops is
    dropped here, so that it and what stands for it are not on the devices together.
    """
    arrays: Arrays = {number: {**some} for number, some in initial.items()}
    facts = []
    for number, adapter in enumerate(built.run.adapter, start=1):
        if type(adapter).fit is BaseAdapter.fit:
            continue
        maps = [one for one in _replaced(built, number) if not _is_given(one, number, arrays)]
        if maps:
            fitting = _Fitting(adapter, others)
            fitting.run(maps, _matrices(built, number - 1, maps, arrays), number, arrays, console)
            facts.append((fitting.kind, fitting.summary(maps)))
    return arrays, facts


class _Map(NamedTuple):
    """A linear map that an adapter replaces: its abstract modules before and after."""

    path: str
    before: LinearMap
    after: Adapted
    stack: tuple[int, ...]


class _Fitting:
    """The fitting of one adapter, and how far its maps are from the matrices they replace."""

    def __init__(self, adapter: BaseAdapter, others: Mapping[str, Adapted]):
        self.adapter, self.others = adapter, others
        self.kind = type(adapter).__module__.rpartition(".")[2]
        self.matrices = self.converted = 0
        self.squares: dict[str, np.ndarray] = {}  # by map: of its errors, and of its weights

    def run(
        self,
        maps: list[_Map],
        matrices: dict[str, Array],
        number: int,
        arrays: Arrays,
        console: Console,
    ) -> None:
        """Put the arrays of these maps among those after `number` adapters."""
        before = [some for stage, some in arrays.items() if stage < number]
        after = arrays.setdefault(number, {})
        total = sum(math.prod(one.stack) for one in maps)
        with progress(console, f"fitting {self.kind}", total) as advance:
            for one in maps:
                matrix = matrices.pop(one.path)
                layers = []
                for layer in np.ndindex(*one.stack):
                    layers.append(self.layer(one, matrix, layer))
                    self.matrices += 1
                    advance(self.matrices, one.path)
                for some in before if one.after.base is None else ():
                    some.pop(f"{one.path}.weight", None)
                for name in [*layers[0]]:
                    value = np.stack([fields.pop(name) for fields in layers])
                    after[f"{one.path}.{name}"] = _placed(value, getattr(one.after, name))

    def layer(self, one: _Map, matrix: Array, layer: tuple[int, ...]) -> Fields:
        """The fields of one layer, the same on every process."""
        there = self.others.get(one.path) if isinstance(one.before, Linear) else None
        weight, other = _whole((matrix, there), tuple(map(jnp.int32, layer)))
        weight = weight.astype(jnp.float32)
        fields = _broadcast(one, lambda: self.fields(one, np.asarray(weight), other))
        squares = np.array(_squares(_with(one, fields, weight), weight))
        self.squares[one.path] = self.squares.get(one.path, 0) + squares
        return fields

    def fields(self, one: _Map, weight: np.ndarray, other: Adapted | None) -> Fields:
        settings, found = self.adapter.at(one.before), None
        if other is not None:
            found = settings.convert(jax.tree.map(np.asarray, other), weight)
        self.converted += found is not None
        return settings.fit(weight, len(one.before.reads)) if found is None else found

    def summary(self, maps: list[_Map]) -> str:
        bits = adapters.bits_per_weight([one.after for one in maps])
        size = "" if bits is None else f" of {bits:.2f} bits a weight"
        converted = f", {self.converted} converted" if self.converted else ""
        return f"{self.matrices} matrices{size}{converted}, {relative_errors(self.squares)}"


def _replaced(built: Built, number: int) -> Iterator[_Map]:
    """The maps that an adapter replaces, by its number from 1."""
    before, after = (_maps(built.stages[at]) for at in (number - 1, number))
    for path, node in after.items():
        if jax.tree.structure(node) != jax.tree.structure(before[path]):
            assert isinstance(node, Adapted)
            yield _Map(path, before[path], node, stack_of(before[path]))


def _is_given(one: _Map, number: int, arrays: Arrays) -> bool:
    """Presence of arrays of a map, which later adapters may have made their base."""
    own = [name for name in named(one.after) if not name.startswith(("base.", "bias"))]
    return any(
        f"{one.path}.{'base.' * deeper}{name}" in some
        for stage, some in arrays.items()
        for deeper in range(stage - number + 1)
        for name in own
    )


def _matrices(built: Built, applied: int, maps: list[_Map], arrays: Arrays) -> dict[str, Array]:
    """The matrices of maps after some adapters: as they were loaded, or else computed."""
    earlier = {number: some for number, some in sorted(arrays.items()) if number <= applied}
    loaded = {path: x for some in earlier.values() for path, x in some.items()}
    found = {
        one.path: loaded[f"{one.path}.weight"]
        for one in maps
        if isinstance(one.before, Linear) and f"{one.path}.weight" in loaded
    }
    rest = [one.path for one in maps if one.path not in found]
    if not rest:
        return found

    def make(key: Array, initial: InitialArrays) -> dict[str, Array]:
        # As `init` does, of whose two keys the first is that of the weights.
        model = built.init(jax.random.split(key)[0], initial, adapters=applied)
        merged = _maps(adapters.merged(model))
        return {path: merged[path].merged().weight.astype(jnp.float32) for path in rest}

    before = abstract_model(built.run.architecture, built.run.adapter[:applied])
    places = _maps(placements(eqx.filter_eval_shape(adapters.merged, before), built.mesh))
    sharded: Callable[..., Any] = jax.sharding.auto_axes(
        make, out_sharding={path: places[path].merged().weight for path in rest}
    )
    options = RUN_ONCE if built.described.chosen.kind == "cpu" else {}
    program = Program(sharded, "matrices", compiler_options=options)
    return found | program(jax.random.key(built.run.train.seed), earlier)


def _maps(model: Any) -> dict[str, LinearMap]:
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_map)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): node
        for path, node in leaves
        if _is_map(node)
    }


@eqx.filter_jit
def _whole(tree: Any, layer: tuple[Array, ...]) -> Any:
    """Arrays of one layer, whole on every device: any process can bring them to its host."""

    def one(x: Array) -> Array:
        for index in layer:
            x = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
        return jax.sharding.reshard(x, PartitionSpec())

    return jax.tree.map(one, tree)


def _broadcast(one: _Map, compute: Callable[[], Fields]) -> Fields:
    """The fields that the first process computes, checked against those of the module."""
    fields = compute() if hosts.is_first() else {}
    names = hosts.broadcast("fields that were fitted", lambda: sorted(fields))
    like = {name: getattr(one.after, name) for name in names}
    shapes = {name: x.shape[len(one.stack) :] for name, x in like.items()}
    if wrong := [name for name, x in fields.items() if x.shape != shapes[name]]:
        what = ", ".join(f"{name} of {fields[name].shape}" for name in wrong)
        raise ValueError(f"{one.path} was fitted {what}; {[shapes[name] for name in wrong]} is due")
    typed = {
        name: fields[name].astype(x.dtype) if fields else np.zeros(shapes[name], x.dtype)
        for name, x in like.items()
    }
    return multihost_utils.broadcast_one_to_all(typed) if hosts.count() > 1 else typed


def _with(one: _Map, fields: Fields, weight: Array) -> Adapted:
    """The module of one layer, for its matrix alone: what else it has is zero."""
    arrays = fields | {"base.weight": weight}
    leaves = [
        arrays.get(name, np.zeros(x.shape[len(one.stack) :], x.dtype))
        for name, x in named(one.after).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(one.after), leaves)


@eqx.filter_jit
def _squares(node: Adapted, weight: Float[Array, "..."]) -> tuple[Array, Array]:
    """Σ (found − weight)² and Σ weight²."""
    found = jax.sharding.reshard(node.merged().weight, PartitionSpec())
    return jnp.sum((found - weight) ** 2), jnp.sum(weight**2)


def _placed(value: np.ndarray, like: jax.ShapeDtypeStruct) -> Array:
    value = value.reshape(like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])


def _is_map(node: Any) -> bool:
    return isinstance(node, LinearMap)
