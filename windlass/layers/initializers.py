"""Initializers: the numbers that weights begin as, where `fan_in` of them go into each output."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.sketch import is_sketched

Draw = Callable[[PRNGKeyArray, tuple[int, ...], int], Float[Array, "..."]]
HostDraw = Callable[[np.random.Generator, tuple[int, ...], int], np.ndarray]


def _sketched(draw: Draw) -> Draw:
    @functools.wraps(draw)
    def drawn(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
        return jnp.zeros(shape) if is_sketched() else draw(key, shape, fan_in)

    return drawn


@_sketched
def narrow(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """Normal without its tails, and so wide that outputs vary as inputs do."""
    return jax.random.truncated_normal(key, -3, 3, shape) / math.sqrt(fan_in)


@_sketched
def uniform(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """As PyTorch's linear maps begin."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


@_sketched
def small(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """Normal of 0.02, whatever goes into an output."""
    return 0.02 * jax.random.normal(key, shape)


def zeros(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    return jnp.zeros(shape)


def host(draw: HostDraw) -> Draw:
    """An initializer computed by NumPy on the host: eigenvalues, say, which a TPU has not.

    In float32. The random numbers follow from the key alone, so that the bits are the same on any
    mesh; one process computes them, and sends them to the others. A plan computes nothing.
    """

    def drawn(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
        def one(words: np.ndarray) -> np.ndarray:
            return np.asarray(draw(np.random.default_rng(words), shape, fan_in), np.float32)

        def every(words: np.ndarray) -> np.ndarray:  # stacked layers have an axis in front
            made = [one(each) for each in words.reshape(-1, words.shape[-1])]
            return np.stack(made).reshape(*words.shape[:-1], *shape)

        whole = jax.pure_callback(
            lambda words: every(np.asarray(words)),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.random.key_data(key),
            vmap_method="expand_dims",
        )
        return _replicated(whole)

    return _sketched(drawn)


def _replicated(x: Array) -> Array:
    """Sent whole to every device before each keeps its part, which compilers have a program for."""
    mesh = jax.sharding.get_abstract_mesh()
    is_auto = not mesh.empty and mesh.are_all_axes_auto
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if is_auto else x
