"""Recurrences along time, for the contexts that know where documents begin."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from windlass.devices.axes import shard


def per_row(start: PyTree, x: Array) -> PyTree:
    """A state to start from, repeated for every row of `x`."""

    def spread(leaf):
        shape = (x.shape[0], *leaf.shape)
        return shard(jnp.broadcast_to(leaf, shape), " ".join(["batch", *"." * leaf.ndim]))

    return jax.tree.map(spread, start)


def along_time(step: Callable, state: PyTree, inputs: PyTree) -> tuple[PyTree, Array]:
    """`lax.scan` over the second axis; the first is that of rows."""
    state, y = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    return state, jnp.moveaxis(y, 0, 1)


def where(flag: Bool[Array, "..."], some: PyTree, others: PyTree) -> PyTree:
    """`jnp.where` over trees, by a flag that has the first axes of their arrays."""

    def one(x, y):
        return jnp.where(flag.reshape(flag.shape + (1,) * (y.ndim - flag.ndim)), x, y)

    return jax.tree.map(one, some, others)
