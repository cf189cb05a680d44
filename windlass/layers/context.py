"""Context of a block: the one way to other positions, packed in training and cached in generation.

A block calls its context to attend or to recur and never holds keys, values or states itself, so
training, prefill, decode and packing are written once for every family.
"""

import copy
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from windlass.layers import recurrence
from windlass.layers.auxiliary import Report, added
from windlass.layers.kernels import attend
from windlass.layers.kv_cache import Cached, KVCache


class Packed:
    """Training: packed sequences, whole, in which no document sees another."""

    def __init__(self, batch: dict[str, Array]):
        self.position, self.document = batch["position"], batch["document"]
        self.reported: Report = {}

    def layer(self, kept: None) -> "Packed":
        view = copy.copy(self)
        view.reported = {}
        return view

    def leave(self) -> None:
        return None

    def finish(self, layers: PyTree) -> None:
        return None

    def attend(
        self, q: Array, k: Array, v: Array, *, window: int | None = None, scale: float | None = None
    ) -> Array:
        """Causal attention, over the last `window` positions where it is given, own included."""
        return attend(
            q,
            k,
            v,
            document=self.document,
            slots=self.document,
            first=0,
            window=window,
            scale=scale,
        )

    def auxiliary(self, name: str, total: ArrayLike, weight: ArrayLike) -> None:
        """Report a metric or an auxiliary loss: its sum over positions, and what that is of.

        Both are sums, so that layers, microbatches and devices add up; what is reported twice
        under one name is added. Not for use inside the cell of `recur`.
        """
        pair = (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))
        self.reported = added(self.reported, {name: pair})

    def recur(self, cell: Callable, start: PyTree, x: Array) -> Array:
        """Run `cell(state, x) -> (state, y)` along each document, from `start` at its beginning."""
        start = recurrence.per_row(start, x)

        def step(state, now):
            x, position = now
            return cell(recurrence.where(position == 0, start, state), x)

        return recurrence.along_time(step, start, (x, self.position))[1]


def enter(batch: dict[str, Array], cache: KVCache | None) -> Packed | Cached:
    """The context for a call of a model."""
    return Packed(batch) if cache is None else Cached(batch, cache)
