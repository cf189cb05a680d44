"""Uniform levels: rounding to the nearest of them, and its straight-through gradient.

With a scale s and levels c + z, c a whole number between two bounds,

    Ŵ = s (c + z)    c = clip(⌊W/s − z⌉, low, high)

    ∂Ŵ/∂W = 1 inside, 0 beyond    ∂Ŵ/∂s = c + z − W/s inside, c + z beyond

Rounding is straight-through, clipping has its true gradient: a weight is inside up to `margin`
steps beyond the outermost levels.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Levels(NamedTuple):
    """The levels c + z between which a weight is rounded, in units of the scale."""

    low: int  # the least c
    high: int
    offset: float = 0.0  # z; a half leaves no level at 0
    margin: float = 0.0  # 0 as in LSQ; a half where the outermost cells are as wide as the others

    @property
    def count(self) -> int:
        return self.high - self.low + 1

    @property
    def largest(self) -> float:
        """Magnitude of the outermost level above 0."""
        return self.high + self.offset


def codes(
    weight: Float[Array, "..."], scale: Float[Array, "..."], levels: Levels
) -> Float[Array, "..."]:
    """The whole numbers c, by comparisons alone.

    No division: its last bit differs between chips, and so would the code of a weight that lies
    in the middle of two levels.
    """
    upright, step = jnp.where(scale < 0, -weight, weight), jnp.abs(scale)
    borders = (c + 0.5 + levels.offset for c in range(levels.low, levels.high))
    above = [(upright > border * step).astype(jnp.float32) for border in borders]
    return levels.low + sum(above[1:], above[0])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def quantized(
    weight: Float[Array, "..."], scale: Float[Array, "..."], levels: Levels, gain: float = 1.0
) -> Float[Array, "..."]:
    """Ŵ, fake quantisation; the scale has an axis, perhaps of size 1, for each of the weight's.

    `gain` multiplies the gradient of the scale, as LSQ's 1 / sqrt(n high) does.
    """
    return scale * (codes(weight, scale, levels) + levels.offset)


def _forward(weight, scale, levels, gain):
    return quantized(weight, scale, levels, gain), (weight, scale)


def _backward(levels, gain, saved, gradient):
    weight, scale = saved
    level = codes(weight, scale, levels) + levels.offset
    steps = weight / jnp.where(scale == 0, 1, scale)
    below = levels.low + levels.offset - levels.margin
    is_inside = (steps >= below) & (steps <= levels.largest + levels.margin)
    shared = tuple(axis for axis, size in enumerate(scale.shape) if size != weight.shape[axis])
    d_scale = gradient * (level - jnp.where(is_inside, steps, 0))
    return (
        jnp.where(is_inside, gradient, 0),
        gain * jnp.sum(d_scale, axis=shared, keepdims=True),
    )


quantized.defvjp(_forward, _backward)


@jax.custom_vjp
def straight_through(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """`y`, with the gradient of `x`: x + stop(y − x) without its rounding error."""
    return y


straight_through.defvjp(lambda x, y: (y, None), lambda saved, gradient: (gradient, None))
