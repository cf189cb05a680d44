"""What a block may know of other positions: whole rows in training, a memory in generation.

A block asks its context to attend or to recur and never holds keys, values or states itself, so
training, generation and packing are written here once for every family.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from windlass.devices.axes import layout, shard
from windlass.layers.kernels import attend

NOTHING = -2  # the document of a slot that holds no token yet; -1 is padding


class Memory(eqx.Module):
    """What a model keeps between the tokens it generates."""

    layers: PyTree  # what each layer's context kept; None before the prompt
    slots: Int[Array, "batch capacity"]  # the document each slot belongs to
    used: Int[Array, ""]

    @staticmethod
    def empty(batch: int, capacity: int) -> "Memory":
        slots = shard(jnp.full((batch, capacity), NOTHING, jnp.int32), "batch seq")
        return Memory(None, slots, jnp.int32(0))


class Packed:
    """Training: whole rows at once, in which no document sees another."""

    def __init__(self, batch: dict[str, Array]):
        self.position, self.document = batch["position"], batch["document"]

    def layer(self, kept: None) -> "Packed":
        return self

    def leave(self) -> None:
        return None

    def finish(self, layers: PyTree) -> None:
        return None

    def attend(
        self, q: Array, k: Array, v: Array, *, window: int | None = None, scale: float | None = None
    ) -> Array:
        """Mix values over the positions before, or the last `window` of them, own one included."""
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

    def recur(self, cell: Callable, start: PyTree, x: Array) -> Array:
        """Run `cell(state, x) -> (state, y)` along each document, from `start` at its beginning."""
        start = _per_row(start, x)

        def step(state, now):
            x, position = now
            state = jax.tree.map(
                lambda fresh, old: jnp.where(_like(position == 0, old), fresh, old), start, state
            )
            return cell(state, x)

        return _along_time(step, start, (x, self.position))[1]


class Cached:
    """Generation: the tokens of this call, after those whose traces are in a memory."""

    def __init__(self, batch: dict[str, Array], memory: Memory):
        self.position, self.document = batch["position"], batch["document"]
        self.used = memory.used
        self.slots = _insert(memory.slots, self.document, self.used)

    def layer(self, kept: tuple | None) -> "CachedLayer":
        return CachedLayer(self, kept)

    def finish(self, layers: PyTree) -> Memory:
        return Memory(layers, self.slots, self.used + self.document.shape[1])


class CachedLayer:
    """One layer's view of a memory: what it asks to keep, in the order it asks."""

    def __init__(self, context: Cached, kept: tuple | None):
        self.context, self.position, self.document = context, context.position, context.document
        self.kept, self.left = kept, []

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

    def recur(self, cell: Callable, start: PyTree, x: Array) -> Array:
        """Go on with `cell` from the remembered state; padding leaves it as it is."""
        state = _per_row(start, x) if self.kept is None else self.kept[len(self.left)]

        def step(state, now):
            x, document = now
            after, y = cell(state, x)
            held = jax.tree.map(
                lambda new, old: jnp.where(_like(document < 0, old), old, new), after, state
            )
            return held, y

        state, y = _along_time(step, state, (x, self.document))
        self.left.append(state)
        return y


def enter(batch: dict[str, Array], memory: Memory | None) -> Packed | Cached:
    """The context for a call of a model."""
    return Packed(batch) if memory is None else Cached(batch, memory)


def _insert(buffer: Array, new: Array, at: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), at, axis=1)


def _per_row(start: PyTree, x: Array) -> PyTree:
    def spread(leaf):
        shape = (x.shape[0], *leaf.shape)
        return shard(jnp.broadcast_to(leaf, shape), " ".join(["batch", *"." * leaf.ndim]))

    return jax.tree.map(spread, start)


def _like(flag: Array, x: Array) -> Array:
    return flag.reshape(flag.shape + (1,) * (x.ndim - 1))


def _along_time(step: Callable, start: PyTree, inputs: PyTree) -> tuple[PyTree, Array]:
    state, y = jax.lax.scan(step, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    return state, jnp.moveaxis(y, 0, 1)
