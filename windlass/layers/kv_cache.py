"""KV cache and state cache: what a model keeps between the tokens that it generates.

Prefill is a first call with whole prompts, decode each later call with a token a row. The cache has
what every layer's context was given to keep, keys and values or recurrent states, in order. Prompts
of several lengths are padded on the left: padding is of document -1, and leaves states alone.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, PyTree

from windlass.devices.axes import layout, shard
from windlass.layers import recurrence
from windlass.layers.auxiliary import Report
from windlass.layers.cells import EMPTY, Cells, slots_of
from windlass.layers.kernels import attend

KV = tuple[Array, Array]  # keys and values of a layer, normed and rotated
SharedKV = Mapping[int | None, KV]  # by the window of the layers that share them; None: all


class KVCache(eqx.Module):
    """KV cache and state cache of a model, as large as prompt and generated tokens together."""

    layers: PyTree  # what each layer's context kept; None before the prefill
    slots: Int[Array, "batch capacity"]  # the document each slot belongs to
    used: Int[Array, ""]

    @staticmethod
    def empty(batch: int, capacity: int) -> "KVCache":
        slots = shard(jnp.full((batch, capacity), EMPTY, jnp.int32), "batch seq")
        return KVCache(None, slots, jnp.int32(0))


class DecodeContext:
    """Generation: the tokens of this call, after those whose keys and states are in a cache."""

    def __init__(self, batch: dict[str, Array], cache: KVCache):
        self.position, self.document = batch["position"], batch["document"]
        self.used = cache.used
        self.slots = _insert(cache.slots, self.document, self.used)
        self.shared: SharedKV = {}

    def leaving_kv(self) -> "DecodeContext":
        """The context itself: layers leave the keys and values of all tokens so far anyway."""
        return self

    def sharing(self, kv: SharedKV) -> "DecodeContext":
        """The context of layers that attend to what earlier ones have cached."""
        view = copy.copy(self)
        view.shared = kv
        return view

    def layer(self, cache: tuple | None) -> "CachedLayer":
        return CachedLayer(self, cache)

    def finish(self, layers: PyTree) -> KVCache:
        return KVCache(layers, self.slots, self.used + self.document.shape[1])


class CachedLayer:
    """One layer's view of a KV cache or state cache: its entries, in the order of its calls."""

    def __init__(self, context: DecodeContext, cache: tuple | None):
        self.context, self.position, self.document = context, context.position, context.document
        self.first = context.used  # position in the row of the call's first token, or its slot
        self.cache, self.left = cache, []
        self.reported: Report = {}

    def leave(self) -> tuple:
        return tuple(self.left)

    def attend(self, q: Array, k: Array, v: Array, *, stride: int = 1, **how: Any) -> Array:
        """Attention to all keys so far, as in training."""
        where = dict(document=self.document, first=self.context.used, stride=stride)
        if stride == 1:
            keys, values = self._cached(_zeros(k, self.capacity), _zeros(v, self.capacity))
            keys, values = (_insert(*pair, self.context.used) for pair in ((keys, k), (values, v)))
            self.left.append((keys, values))
            return attend(q, keys, values, slots=self.context.slots, **where, **how)
        cells = self._cells(stride)
        keys, values, slots = self._merged(k, v, cells)
        return attend(q, keys, values, slots=slots, phase=cells.phase, **where, **how)

    def attend_shared(self, q: Array, **how: Any) -> Array:
        """Attention to keys and values that another layer has cached; this one has no cache."""
        keys, values = self.context.shared[how["window"]]
        where = dict(document=self.document, first=self.context.used)
        return attend(q, keys, values, slots=self.context.slots, **where, **how)

    def cells(self, x: Array, stride: int) -> Array:
        """Cells as in training; of a call that ends no cell there is one slot, of zeros."""
        return x if stride == 1 else self._cells(stride).take(x)

    def coarser(self, stride: int) -> "CachedLayer":
        """The context of cells, as in training; what it keeps is in the same cache."""
        cells, view = self._cells(stride), copy.copy(self)
        view.position, view.document = cells.take(self.position) // stride, cells.documents
        view.first = cells.slot
        return view

    def last(self, x: Array, n: int) -> tuple[Array, ...]:
        """The last n inputs, as in training: n - 1 of them are cached.

        Padding and slots without a cell are nobody's input, wherever in a call they stand.
        """
        (state,) = self._cached(recurrence.zeros(x, n - 1))
        counts = jnp.pad(self.document >= 0, ((0, 0), (n - 1, 0)), constant_values=True)
        order = jnp.argsort(counts, axis=1, stable=True)  # what counts is behind, in order
        inputs = recurrence.picked(jnp.concatenate([state, x], axis=1), order)
        self.left.append((inputs[:, inputs.shape[1] - (n - 1) :],))
        own = jnp.argsort(order, axis=1)[:, n - 1 :]
        return tuple(
            recurrence.aged(recurrence.picked(inputs, own - age), age, self.position)
            for age in range(n - 1, -1, -1)
        )

    def before(self, x: Array, n: int) -> Array:
        """The last n inputs as one array, as in training."""
        return jnp.stack(self.last(x, n), axis=2)

    def scan(self, combine: Callable[[PyTree, PyTree], PyTree], elements: PyTree) -> PyTree:
        """Associative scan, as in training: the prefix of all elements so far is cached."""
        # What it is before the first token is never seen: a document begins afresh.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), elements)
        (state,) = self._cached(zeros)
        sequence = jax.tree.map(
            lambda old, x: jnp.concatenate([old[:, None], x], axis=1), state, elements
        )
        front = ((0, 0), (1, 0))
        prefixes = recurrence.scan(
            combine,
            sequence,
            begins=jnp.pad(self.position == 0, front),
            counts=jnp.pad(self.document >= 0, front, constant_values=True),
        )
        self.left.append((jax.tree.map(lambda x: x[:, -1], prefixes),))
        return jax.tree.map(lambda x: x[:, 1:], prefixes)

    def auxiliary(self, name: str, total: ArrayLike, weight: ArrayLike) -> None:
        """Nothing is reported in generation."""

    def recur(self, cell: Callable, start: PyTree, x: Array, *, remat: bool = False) -> Array:
        """Recurrence, as in training: the state is cached."""
        (state,) = self._cached(recurrence.per_row(start, x))

        def step(state, now):
            x, document = now
            after, y = cell(state, x)
            return recurrence.where(document < 0, state, after), y

        state, y = recurrence.along_time(step, state, (x, self.document))
        self.left.append((state,))
        return y

    def chunked(self, function: Callable, start: PyTree, x: PyTree) -> Array:
        """A recurrence that a function computes whole, as in training: the state is cached."""
        (state,) = self._cached(recurrence.per_row(start, self.position))
        counts = self.document >= 0
        state, y = function(state, x, begins=self.position == 0, counts=counts)
        self.left.append((state,))
        return y

    @property
    def capacity(self) -> int:
        return self.context.slots.shape[1]

    def _cached(self, *initial: PyTree) -> tuple:
        """The cache entry of this call, by its turn, or `initial` before the prefill."""
        return initial if self.cache is None else self.cache[len(self.left)]

    def _cells(self, stride: int) -> Cells:
        return Cells(self.position, self.document, stride, self.first)

    def _merged(self, k: Array, v: Array, cells: Cells) -> tuple[Array, Array, Array]:
        """Keys, values and documents of all cells so far; a slot may be half over in a call."""
        capacity = slots_of(self.capacity, cells.stride, is_aligned=False)
        none = recurrence.zeros(cells.documents, capacity) + EMPTY
        old = self._cached(_zeros(k, capacity), _zeros(v, capacity), none)
        is_new = cells.documents != EMPTY

        def merge(old, new):
            here = jax.lax.dynamic_slice_in_dim(old, cells.slot, new.shape[1], axis=1)
            return _insert(old, recurrence.where(is_new, new, here), cells.slot)

        keys, values, documents = map(merge, old, (k, v, cells.documents))
        self.left.append((keys, values, documents))
        return keys, values, documents


def _zeros(x: Array, capacity: int) -> Array:
    shape = (x.shape[0], capacity, *x.shape[2:])
    return jnp.zeros(shape, x.dtype, out_sharding=layout("batch seq kv_heads head_dim", shape))


def _insert(buffer: Array, new: Array, at: int | Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), at, axis=1)
