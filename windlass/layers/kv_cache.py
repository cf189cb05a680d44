"""KV cache and state cache: what a model keeps between the tokens that it generates.

Prefill is a first call with whole prompts, decode each later call with a token a row. The cache has
what every layer's context was given to keep, keys and values or recurrent states, in order.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, PyTree

from windlass.devices.axes import layout, shard
from windlass.layers import recurrence
from windlass.layers.auxiliary import Report
from windlass.layers.kernels import attend

EMPTY = -2  # the document of a slot that holds no token yet; -1 is padding


class KVCache(eqx.Module):
    """KV cache and state cache of a model, as large as prompt and generated tokens together."""

    layers: PyTree  # what each layer's context kept; None before the prefill
    slots: Int[Array, "batch capacity"]  # the document each slot belongs to
    used: Int[Array, ""]

    @staticmethod
    def empty(batch: int, capacity: int) -> "KVCache":
        slots = shard(jnp.full((batch, capacity), EMPTY, jnp.int32), "batch seq")
        return KVCache(None, slots, jnp.int32(0))


class Cached:
    """Generation: the tokens of this call, after those whose keys and states are in a cache."""

    def __init__(self, batch: dict[str, Array], cache: KVCache):
        self.position, self.document = batch["position"], batch["document"]
        self.used = cache.used
        self.slots = _insert(cache.slots, self.document, self.used)

    def layer(self, kept: tuple | None) -> "CachedLayer":
        return CachedLayer(self, kept)

    def finish(self, layers: PyTree) -> KVCache:
        return KVCache(layers, self.slots, self.used + self.document.shape[1])


class CachedLayer:
    """One layer's view of a cache: what it keeps, in the order of its calls."""

    def __init__(self, context: Cached, kept: tuple | None):
        self.context, self.position, self.document = context, context.position, context.document
        self.kept, self.left = kept, []
        self.reported: Report = {}

    def leave(self) -> tuple:
        return tuple(self.left)

    def attend(
        self, q: Array, k: Array, v: Array, *, window: int | None = None, scale: float | None = None
    ) -> Array:
        capacity = self.context.slots.shape[1]

        def blank(x):
            shape = (x.shape[0], capacity, *x.shape[2:])
            axes = "batch seq kv_heads head_dim"
            return jnp.zeros(shape, x.dtype, out_sharding=layout(axes, shape))

        blanks = (blank(k), blank(v))
        keys, values = blanks if self.kept is None else self.kept[len(self.left)]
        keys, values = (_insert(*pair, self.context.used) for pair in ((keys, k), (values, v)))
        self.left.append((keys, values))
        return attend(
            q,
            keys,
            values,
            document=self.document,
            slots=self.context.slots,
            first=self.context.used,
            window=window,
            scale=scale,
        )

    def auxiliary(self, name: str, total: ArrayLike, weight: ArrayLike) -> None:
        """Nothing is reported in generation."""

    def recur(self, cell: Callable, start: PyTree, x: Array) -> Array:
        """Go on with `cell` from the cached state; padding leaves it as it is."""
        state = recurrence.per_row(start, x) if self.kept is None else self.kept[len(self.left)]

        def step(state, now):
            x, document = now
            after, y = cell(state, x)
            return recurrence.where(document < 0, state, after), y

        state, y = recurrence.along_time(step, state, (x, self.document))
        self.left.append(state)
        return y


def _insert(buffer: Array, new: Array, at: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), at, axis=1)
