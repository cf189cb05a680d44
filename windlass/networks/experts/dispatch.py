"""Dropless dispatch of tokens to experts: sorted by expert, so that those of one lie together.

Rows are pairs of a token and one of its experts. With σ the order that sorts them, dispatch is
D: x ↦ x[σ / k], and combining is its transpose, y ↦ Σ over the k rows of each token: each is the
gradient of the other, so that neither is a scatter.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from windlass.devices.sketch import on_gpu
from windlass.networks.experts import grouped_matmul

# Name of a grouped matmul in a program: the rows that a device computes where experts have as many
# tokens as each other, and those that it has room for.
_NAMES = re.compile(r"experts_(\d+)_of_(\d+)")


class Groups(NamedTuple):
    """Rows sorted by expert; those of experts that are not here come last."""

    sizes: Int[Array, " experts"]  # rows of each expert
    order: Int[Array, " rows"]  # number of each sorted row among all pairs
    places: Int[Array, "tokens active"]  # of each pair among the sorted rows; beyond: not there

    @property
    def owner(self) -> Int[Array, " rows"]:
        """Expert of each row."""
        ends = jnp.cumsum(self.sizes)
        rows = jnp.arange(len(self.order), dtype=ends.dtype)
        last = len(self.sizes) - 1
        return jnp.minimum(jnp.searchsorted(ends, rows, side="right", method="sort"), last)

    @property
    def is_here(self) -> Bool[Array, " rows"]:
        return jnp.arange(len(self.order)) < jnp.sum(self.sizes)


def grouped(chosen: Int[Array, "tokens active"], experts: int) -> Groups:
    """Groups of the experts 0 .. experts - 1; other numbers are experts of other devices.

    A token has each expert once, so that at most min(active, experts) of its rows are here.
    """
    tokens, active = chosen.shape
    is_here = (chosen >= 0) & (chosen < experts)
    flat = jnp.where(is_here, chosen, experts).reshape(-1)
    order = jnp.argsort(flat)
    bounds = jnp.searchsorted(flat[order], jnp.arange(experts + 1, dtype=flat.dtype))
    places = jnp.argsort(order).reshape(tokens, active)
    return Groups(
        jnp.diff(bounds).astype(jnp.int32), order[: tokens * min(active, experts)], places
    )


@jax.custom_vjp
def dispatched(x: Float[Array, "tokens embed"], groups: Groups) -> Float[Array, "rows embed"]:
    """The token of each row."""
    return x[groups.order // groups.places.shape[1]]


@jax.custom_vjp
def combined(y: Float[Array, "rows embed"], groups: Groups) -> Float[Array, "tokens embed"]:
    """The sum of each token's rows."""
    tokens, active = groups.places.shape
    each = y.at[groups.places.reshape(-1)].get(mode="fill", fill_value=0)
    return jnp.sum(each.reshape(tokens, active, -1), axis=1)


dispatched.defvjp(
    lambda x, groups: (dispatched(x, groups), groups),
    lambda groups, d: (combined(d, groups), None),
)
combined.defvjp(
    lambda y, groups: (combined(y, groups), groups),
    lambda groups, d: (dispatched(d, groups), None),
)


def share(name: str) -> float:
    """The share of its rows that a grouped matmul computes, by its name in a program; else 1."""
    match = _NAMES.fullmatch(name)
    return int(match[1]) / int(match[2]) if match else 1.0


def ragged_dot(
    x: Float[Array, "rows read"],
    weight: Float[Array, "experts read written"],
    groups: Groups,
    ways: int,
) -> Float[Array, "rows written"]:
    """Grouped matmul, y = x W_e of the expert e of each row, where `ways` devices have others."""
    rows, pairs = len(groups.order), groups.places.size
    in_kernels = on_gpu() and x.dtype.itemsize == 2
    return _named(f"experts_{pairs // ways}_of_{rows}", in_kernels)(x, weight, groups.sizes)


@functools.cache
def _named(name: str, in_kernels: bool) -> Callable:
    """A grouped matmul as a part of its own in a program, for whoever counts its FLOPs."""

    def product(x: Array, weight: Array, sizes: Array) -> Array:
        of = grouped_matmul.ragged_dot if in_kernels else jax.lax.ragged_dot
        return of(x, weight, sizes)

    product.__name__ = name
    return jax.jit(product)
