"""Decomposition of a sequence into scales: cells of r inputs, cells of r cells, and so on.

Cell j of a scale has inputs r (j + 1) - 1 and before of the finer scale, counted from the beginning
of its document: never one behind, and zeros for what lies before the document. It is there from
its newest input on.
"""

from abc import abstractmethod
from functools import reduce

import equinox as eqx
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import shard
from windlass.layers import recurrence
from windlass.layers.linear import Linear

Inputs = Float[Array, "batch seq *width"]  # hidden states, or values by heads
Cells = Float[Array, "batch slots *width"]


class Downsampling(eqx.Module):
    """From one scale to the next coarser one, of the context of the finer one."""

    kernel: eqx.AbstractVar[int]  # inputs of a cell
    stride: eqx.AbstractVar[int]  # by which cells are apart

    @abstractmethod
    def __call__(self, x: Inputs, context) -> Cells: ...

    def inputs(self, x: Inputs, context) -> list[Cells]:
        """The inputs of every cell, oldest first; zeros for those before the document."""
        return [context.cells(one, self.stride) for one in context.last(x, self.kernel)]


class Convolution(Downsampling):
    """Strided convolution, y_j = Σ_i W_i x_{r (j + 1) - 1 - i} + b."""

    map: Linear
    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __init__(
        self, sizes: dict[str, int], kernel: int, stride: int, *, bias: bool, key: PRNGKeyArray
    ):
        window = sizes | {"embed": kernel * sizes["embed"]}
        self.map = Linear("embed", "heads head_dim", window, bias=bias, key=key)
        self.kernel, self.stride = kernel, stride

    def __call__(self, x: Inputs, context) -> Cells:
        inputs = self.inputs(joined(x), context)
        y = checkpoint_name(self.map(jnp.concatenate(inputs, axis=-1)), "cells")
        return y if x.ndim == 4 else joined(y)


class AveragePool(Downsampling):
    """Mean of the inputs of a cell."""

    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __call__(self, x: Inputs, context) -> Cells:
        there = jnp.minimum(self.kernel, _reach(context, self.stride))
        count = there.reshape(*there.shape, *[1] * (x.ndim - 2)).astype(x.dtype)
        return reduce(jnp.add, self.inputs(x, context)) / count


class MaxPool(Downsampling):
    """Maximum of the inputs of a cell, of each channel."""

    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __call__(self, x: Inputs, context) -> Cells:
        reach, inputs = _reach(context, self.stride), self.inputs(x, context)
        ages = range(len(inputs) - 1, -1, -1)
        there = [
            recurrence.where(reach > age, one, jnp.full_like(one, -jnp.inf))
            for age, one in zip(ages, inputs, strict=True)
        ]
        return reduce(jnp.maximum, there)


def _reach(context, stride: int) -> Int[Array, "batch slots"]:
    """Inputs of a document up to the newest one of each cell."""
    return stride * (context.coarser(stride).position + 1)


def joined(x: Inputs) -> Float[Array, "batch seq embed"]:
    """All channels of a position in one axis, on every device: an all-gather of heads."""
    if x.ndim == 3:
        return x
    return shard(x, "batch seq . .").reshape(*x.shape[:2], -1)
