"""Recurrences along time, for the contexts that know where documents begin and what is padding.

Three forms: any cell, a step after another (`along_time`); an associative one, in a logarithm of
steps (`scan`); and none but of the last inputs themselves (`last`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from windlass.devices.axes import shard

STATE = "state"  # the name of states for rematerialization


def linear(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
    """h_t = a_t h_{t-1} + b_t of elements (a, b), to be scanned: the second of a prefix is h."""
    (a, x), (b, y) = earlier, later
    return a * b, b * x + y


def scan(
    combine: Callable[[PyTree, PyTree], PyTree],
    elements: PyTree,
    *,
    begins: Bool[Array, "batch seq"],
    counts: Bool[Array, "batch seq"] | None = None,
) -> PyTree:
    """Associative scan along the second axis: x_1, x_1 x_2, x_1 x_2 x_3, ... by `combine`.

    It starts afresh where `begins` is true, and what does not count leaves the prefix as it is:
    combine is lifted to elements with these two flags, which leaves it associative.
    """

    def joined(earlier, later):
        (first, x), (second, y) = earlier, later
        return first | second, where(second, y, combine(x, y))

    def counted(earlier, later):
        (first, ours, x), (second, theirs, y) = earlier, later
        both = where(ours & ~second, combine(x, y), y)
        return first | second, ours | theirs, where(theirs, both, x)

    if counts is None:
        return jax.lax.associative_scan(joined, (begins, elements), axis=1)[1]
    return jax.lax.associative_scan(counted, (begins & counts, counts, elements), axis=1)[2]


def last(x: Array, n: int, position: Int[Array, "batch seq"]) -> tuple[Array, ...]:
    """The last n inputs at each position, oldest first; `x` has n - 1 more in front.

    An array for each: an axis of n in front of the width would be padded on TPUs. Those before
    position 0 are zeros.
    """
    length = position.shape[1]
    return tuple(
        aged(x[:, n - 1 - age : n - 1 - age + length], age, position)
        for age in range(n - 1, -1, -1)
    )


def aged(x: Array, age: int, position: Int[Array, "batch seq"]) -> Array:
    """Inputs of so many positions ago, zeros where a document had not begun."""
    return where(position >= age, x, jnp.zeros_like(x))


def picked(x: Array, index: Int[Array, "batch picked"]) -> Array:
    """Entries of each row by their numbers."""
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].get(out_sharding=spec(x))


def zeros(x: Array, length: int) -> Array:
    """Zeros of another length, laid out as `x` is."""
    return jnp.zeros((x.shape[0], length, *x.shape[2:]), x.dtype, out_sharding=spec(x))


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


def spec(x: Array) -> PartitionSpec | None:
    """Partition spec of an array; None where there is no mesh."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
