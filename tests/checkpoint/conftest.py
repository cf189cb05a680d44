"""A small state with everything in it that a checkpoint can meet."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from windlass.checkpoint.store import Store

IDENTITY = {"model": "llama 1b", "tokenizer": "byte 8f3a", "data": "stories 77b0"}


class Layer(eqx.Module):
    weight: Array
    bias: Array
    table: Array
    mask: Array
    adapter: None
    width: int = eqx.field(static=True)


class State(NamedTuple):
    step: Array
    key: Array
    model: dict[str, Any]
    moments: Any
    average: Any
    carry: tuple
    nothing: Array


def host_state(seed: int) -> State:
    random = np.random.default_rng(seed)
    layer = Layer(
        weight=jnp.asarray(random.normal(size=(16, 8)), jnp.float32),
        bias=jnp.asarray(random.normal(size=8), jnp.bfloat16),
        table=jnp.asarray(random.integers(-8, 8, (8, 4)), jnp.int8),
        mask=jnp.asarray(random.integers(0, 2, 8), jnp.bool),
        adapter=None,
        width=8,
    )
    trained = {"layer": {"weight": layer.weight}}
    return State(
        step=jnp.int32(seed),
        key=jax.random.key_data(jax.random.key(seed)),
        model={"layer": layer, "empty": {}},
        moments=optax.adamw(1e-3).init(trained),
        average=None,
        carry=(),
        nothing=jnp.zeros((0, 4)),
    )


@pytest.fixture
def place():
    """`place(seed, shape)`: the state of that seed on a mesh data x fsdp x tensor."""

    def placed(seed: int, shape: tuple[int, int, int] = (1, 1, 1)) -> State:
        devices = jax.devices()[: shape[0] * shape[1] * shape[2]]
        mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), devices=devices)

        def put(x: Array) -> Array:
            axes = ("fsdp", "tensor") if x.shape == (16, 8) else ()
            return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

        return jax.tree.map(put, host_state(seed))

    return placed


@pytest.fixture
def identity() -> dict[str, str]:
    return dict(IDENTITY)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def opened(tmp_path, said):
    """`opened(**options)`: a store of the run in `tmp_path`, closed at the end of the test."""
    stores = []

    def make(**options) -> Store:
        stores.append(Store(tmp_path, say=said.append, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def abstract():
    """A state without its numbers, as a run that starts again describes it."""

    def shapes(state):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )

    return shapes


@pytest.fixture
def same_bits():
    def same(left, right) -> bool:
        assert jax.tree.structure(left) == jax.tree.structure(right)
        pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
        return all(
            a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            for a, b in pairs
        )

    return same
