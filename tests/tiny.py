"""Small models, rows and meshes to test with."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from windlass.adapters import Adapted, BaseAdapter, merged
from windlass.adapters.lora import Adapter
from windlass.devices.axes import placements, row_axes, stack_of
from windlass.devices.mesh import build
from windlass.hub.names import placed as placed_tensors
from windlass.layers.linear import LinearMap
from windlass.objectives import Carry, Tally, settled
from windlass.objectives.next_token import Objective

# The widths of the small models in the recipes of tests.
WIDTHS = dict(embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=8, theta=1e4)


def config(family: str):
    return importlib.import_module(f"windlass.models.{family}").Config.tiny()


def wide(family: str, **changes):
    """The tiny config with so many heads that eight devices can share them.

    And without dropout, whose masks are others where a batch is accumulated in other parts.
    """
    tiny = config(family)
    fields = dict(heads=8, kv_heads=2, dropout=0.0) | changes
    own = {name: value for name, value in fields.items() if hasattr(tiny, name)}
    return dataclasses.replace(tiny, **own)


def model(family: str):
    """The tiny model of a family, with random norms and biases: none of them is 1 or 0."""
    return made(config(family))


@cache
def made(config, adapter: Adapter | None = None):
    """The model of a config, adapted or not, with random norms and biases."""
    rng = np.random.default_rng(7)

    def roughen(x):
        rough = np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(x.dtype)
        return jax.device_put(rough, jax.devices()[0])  # on no mesh, wherever it is first asked for

    def init(key):
        plain = config.init(key)
        return plain if adapter is None else adapter.adapt(plain, names={}, key=key)

    return jax.tree.map(roughen, eqx.filter_jit(init)(jax.random.key(0)))


def adapted(model: Any, *chosen: BaseAdapter) -> Any:
    """A model with these adapters, in order, each fitted to the matrices it replaces."""
    for number, adapter in enumerate(chosen):
        made = eqx.filter_jit(adapter.adapt)(model, names={}, key=jax.random.key(number))
        is_map = lambda node: isinstance(node, LinearMap)  # noqa: E731
        model = jax.tree.map(partial(_fitted, adapter), model, made, is_leaf=is_map)
    return model


def _fitted(adapter: BaseAdapter, before, after):
    if not isinstance(after, Adapted) or jax.tree.structure(before) == jax.tree.structure(after):
        return after
    stack, matrix = stack_of(before), np.asarray(merged(before).weight, np.float32)
    own = [adapter.at(before).fit(matrix[layer], len(before.reads)) for layer in np.ndindex(*stack)]
    for name in own[0]:
        value = jnp.asarray(np.stack([fields[name] for fields in own]))
        value = value.reshape(*stack, *own[0][name].shape)
        after = eqx.tree_at(lambda node: getattr(node, name), after, value)  # noqa: B023
    return after


def abstract(config) -> PyTree:
    """The model of a config without its values."""
    return eqx.filter_eval_shape(config.init, jax.random.key(0))


def filled(model, names: Mapping[str, str], tensors: Mapping) -> PyTree:
    """A model, abstract or not, with the arrays of a checkpoint that are those of its own."""
    arrays = placed_tensors(model, names, tensors, "the tensors")
    is_array = lambda x: isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # noqa: E731
    shapes, rest = eqx.partition(model, is_array)
    return eqx.combine(jax.tree.structure(shapes).unflatten(list(arrays.values())), rest)


def documents(vocab: int, lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Random documents; one of n tokens has n - 1 to predict."""
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab, size=n).astype(np.int32) for n in lengths]


def packed(rows: Sequence[Sequence[np.ndarray]], length: int) -> dict[str, jax.Array]:
    """A batch: each row the documents given for it, then padding."""
    batch = {
        name: np.full((len(rows), length), blank, dtype)
        for name, blank, dtype in [
            ("tokens", 0, np.int32),
            ("targets", 0, np.int32),
            ("weight", 0, np.float32),
            ("position", 0, np.int32),
            ("document", -1, np.int32),
        ]
    }
    for row, held in enumerate(rows):
        at = 0
        for number, tokens in enumerate(held):
            here = (row, slice(at, at := at + len(tokens) - 1))
            batch["tokens"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
            batch["position"][here] = np.arange(len(tokens) - 1)
            batch["document"][here], batch["weight"][here] = number, 1
    return {name: jnp.asarray(column) for name, column in batch.items()}


def rows(vocab: int, seed: int = 0) -> dict[str, jax.Array]:
    """Eight packed rows of 12: documents of many lengths, some padding, weights of 0 and 0.5."""
    lengths = [[13], [5, 5, 5], [7, 3], [2, 2, 9], [10, 4], [8], [3, 10], [6, 7, 2]]
    batch = packed([documents(vocab, each, seed + i) for i, each in enumerate(lengths)], 12)
    uneven = np.random.default_rng(seed).choice([0, 0.5, 1], size=(8, 12)).astype(np.float32)
    return batch | {"weight": batch["weight"] * uneven}


def tally(model, batch: dict[str, jax.Array], objective: Objective | None = None) -> Tally:
    """What an objective, next_token unless told otherwise, returns for a batch."""
    objective = objective or Objective()
    zero = jnp.int32(0)
    return objective(model, batch, key=None, carry=Carry(), helpers={}, step=zero, steps=1)[0]


def loss(model, batch: dict[str, jax.Array], objective: Objective | None = None) -> jax.Array:
    """The mean loss of a batch, without what the model adds to it."""
    total, weight, *_ = tally(model, batch, objective)
    return total / weight


def whole_loss(model, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean loss of a batch with the auxiliary losses of the model: what is trained."""
    total, weight, *_ = settled(tally(model, batch), model)
    return total / weight


@contextmanager
def on(sizes: tuple[int, int, int], expert: int = 1) -> Iterator[jax.sharding.Mesh]:
    """Data x fsdp x tensor, and perhaps expert, as the current mesh."""
    data, fsdp, tensor = sizes
    split = dict(data=data, fsdp=fsdp, expert=expert, tensor=tensor)
    mesh = build(split, jax.devices()[: math.prod(split.values())])
    with jax.set_mesh(mesh):
        yield mesh


def placed(tree: PyTree, batch: PyTree, mesh: jax.sharding.Mesh) -> tuple[PyTree, PyTree]:
    """Weights and rows where they belong on a mesh, which must be the current one."""

    def move(x):
        return jax.device_put(x, NamedSharding(mesh, row_axes(mesh)))

    arrays, static = eqx.partition(tree, eqx.is_array)
    arrays = jax.device_put(arrays, placements(arrays, mesh))
    return eqx.combine(arrays, static), jax.tree.map(move, batch)


def placed_shapes(model: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """An abstract model with the shardings of its arrays on a mesh."""
    shapes, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    placed = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        placements(shapes, mesh),
    )
    return eqx.combine(placed, static)


def apart(found: PyTree, expected: PyTree) -> float:
    """The largest difference between two trees, each array's relative to its largest entry."""
    gaps = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(b).max(), 1e-9),
        found,
        expected,
    )
    return max(jax.tree.leaves(gaps))


def loss_after(
    loss: Callable[[PyTree, jax.Array], jax.Array], weights: PyTree, *, rate: float, steps: int
) -> float:
    """Loss of weights and a key, on keys that no step has seen, after Adam on another each step."""
    optimizer = optax.adam(rate)

    def step(carry, key):
        weights, moments = carry
        gradient = jax.grad(loss)(weights, key)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(weights, updates), moments), None

    @jax.jit
    def trained(weights):
        keys = jax.random.split(jax.random.key(1), steps)
        (weights, _), _ = jax.lax.scan(step, (weights, optimizer.init(weights)), keys)
        return jnp.mean(jax.lax.map(lambda key: loss(weights, key), jax.random.split(keys[0], 20)))

    return float(trained(weights))
