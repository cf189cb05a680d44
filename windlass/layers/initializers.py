"""The random numbers that weights begin as, where `fan_in` of them go into each output."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.sketch import is_sketched

Draw = Callable[[PRNGKeyArray, tuple[int, ...], int], Float[Array, "..."]]


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
