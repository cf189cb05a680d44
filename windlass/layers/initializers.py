"""Initializers: the numbers that weights begin as, where `fan_in` of them go into each output."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.sketch import is_sketched

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], int], Float[Array, "..."]]
HostInitializer = Callable[[np.random.Generator, tuple[int, ...], int], np.ndarray]


def _sketched(initializer: Initializer) -> Initializer:
    @functools.wraps(initializer)
    def init(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
        return jnp.zeros(shape) if is_sketched() else initializer(key, shape, fan_in)

    return init


@_sketched
def narrow(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """LeCun normal, truncated: so wide, 1 / sqrt(fan_in), that outputs vary as inputs do."""
    return jax.random.truncated_normal(key, -3, 3, shape) / math.sqrt(fan_in)


@_sketched
def uniform(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """Uniform within 1 / sqrt(fan_in) of 0, as PyTorch's linear maps begin."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


@_sketched
def small(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """Normal of standard deviation 0.02, whatever the fan-in."""
    return 0.02 * jax.random.normal(key, shape)


def zeros(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    return jnp.zeros(shape)


def host(initializer: HostInitializer) -> Initializer:
    """An initializer computed by NumPy on the host: eigenvalues, say, which a TPU has not.

    In float32. The random numbers follow from the key alone, so that the bits are the same on any
    mesh; one process computes them, and sends them to the others. A plan computes nothing.
    """

    def init(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
        def layer(seed: np.ndarray) -> np.ndarray:
            return np.asarray(initializer(np.random.default_rng(seed), shape, fan_in), np.float32)

        def every(seed: np.ndarray) -> np.ndarray:  # stacked layers have an axis in front
            layers = [layer(each) for each in seed.reshape(-1, seed.shape[-1])]
            return np.stack(layers).reshape(*seed.shape[:-1], *shape)

        weights = jax.pure_callback(
            lambda seed: every(np.asarray(seed)),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.random.key_data(key),
            vmap_method="expand_dims",
        )
        return _replicated(weights)

    return _sketched(init)


def _replicated(x: Array) -> Array:
    """Sent whole to every device before each keeps its part, which compilers have a program for."""
    mesh = jax.sharding.get_abstract_mesh()
    is_auto = not mesh.empty and mesh.are_all_axes_auto
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if is_auto else x
