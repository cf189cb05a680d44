"""Auxiliary losses and metrics: sums that blocks report beside their output.

A block reports with `context.auxiliary(name, total, weight)`. The stack carries the reports out of
its loop and adds them up over layers; a name with `{layer}` in it becomes a metric of each layer.
What has no context, such as a linear map, asks `reporting` for that of its block.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

Sum = Float[Array, ""]
Report = dict[str, tuple[Sum, Sum]]  # by name, a total and its weight
Stacked = dict[str, tuple[Float[Array, " layers"], Float[Array, " layers"]]]

LAYER = "{layer}"


_around: ContextVar[Any] = ContextVar("context", default=None)


@contextmanager
def inside(context: Any) -> Iterator[None]:
    """Make it the context that `reporting` finds; None: nobody can report."""
    before = _around.set(context)
    try:
        yield
    finally:
        _around.reset(before)


def reporting() -> Any:
    """The context of the block that is being computed; None: there is none to report to."""
    return _around.get()


class AuxiliaryLosses(eqx.Module):
    """A module that declares which of its reports are losses, and the coefficient of each."""

    losses: eqx.AbstractVar[dict[str, float]]


def coefficients(model: PyTree) -> dict[str, float]:
    """The coefficients of all auxiliary losses that modules of a model declare."""
    factors: dict[str, float] = {}

    def note(node) -> bool:
        for name, factor in node.losses.items() if isinstance(node, AuxiliaryLosses) else ():
            if factors.setdefault(name, factor) != factor:
                raise ValueError(f"{name} is declared with {factors[name]} and with {factor}")
        return False  # not a leaf: modules inside it may declare losses, too

    jax.tree.leaves(model, is_leaf=note)
    return factors


def over_tokens(
    values: Float[Array, "batch seq"], document: Int[Array, "batch seq"]
) -> tuple[Sum, Sum]:
    """The total of tokens' values and their number, to be reported; padding is in no document."""
    is_token = document >= 0
    return jnp.sum(jnp.where(is_token, values, 0)), jnp.sum(is_token, dtype=jnp.float32)


def added(*reports: Report) -> Report:
    """Reports in one: totals and weights of the same name are added."""
    sums: Report = {}
    for report in reports:
        for name, pair in report.items():
            sums[name] = jax.tree.map(jnp.add, sums[name], pair) if name in sums else pair
    return sums


def over_layers(report: Stacked, layers: Sequence[int]) -> Report:
    """The report of these layers, along the first axis: their sum, or each by its number."""

    def one(name: str, pair: tuple[Array, Array]) -> Report:
        if LAYER not in name:
            return {name: jax.tree.map(lambda x: jnp.sum(x, axis=0), pair)}
        return {
            name.replace(LAYER, str(layer)): jax.tree.map(lambda x, i=i: x[i], pair)
            for i, layer in enumerate(layers)
        }

    return added(*(one(name, pair) for name, pair in report.items()))
