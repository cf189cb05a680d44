"""Context of a block: the one way to other positions, packed in training and cached in generation.

A block never holds keys, values or states itself: it calls its context, so that training, prefill,
decode and packing are written once for every family. A context has

- `attend(q, k, v, causal, window, stride, scale)`, attention over the own document;
- `leaving_kv()`, the context of layers whose keys and values others are to share, `sharing(kv)`,
  that of those others, and `attend_shared(q, ...)`, attention to what is shared;
- `cells(x, stride)`, inputs at the ends of cells, for keys and values of attention with a stride;
- `recur(cell, start, x, remat)`, a recurrence of any form, a step after another;
- `chunked(function, start, x)`, one that a function computes for many positions at once;
- `scan(combine, elements)`, an associative recurrence, such as a diagonal state space;
- `last(x, n)`, the last n inputs, an array each, and `before(x, n)`, the same in one array, for
  short convolutions and delays;
- `coarser(stride)`, the context of cells, where they are what positions are here.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, PyTree

from windlass.layers import recurrence
from windlass.layers.auxiliary import Report, added, inside
from windlass.layers.cells import Cells
from windlass.layers.kernels import attend
from windlass.layers.kv_cache import KV, DecodeContext, KVCache, SharedKV


class Packed:
    """Training: packed sequences, whole, in which no document sees another."""

    def __init__(self, batch: dict[str, Array]):
        self.position, self.document = batch["position"], batch["document"]
        self.reported: Report = {}
        self.left: list[KV] | None = None  # keys and values of a layer; None: they stay in it
        self.shared: SharedKV = {}

    def layer(self, cache: None) -> "Packed":
        view = copy.copy(self)
        view.reported = {}
        view.left = None if self.left is None else []
        return view

    def leave(self) -> tuple[KV, ...] | None:
        return None if self.left is None else tuple(self.left)

    def leaving_kv(self) -> "Packed":
        """The context of layers that leave their keys and values, one pair for each `attend`."""
        view = copy.copy(self)
        view.left = []
        return view

    def sharing(self, kv: SharedKV) -> "Packed":
        """The context of layers that attend to keys and values of earlier ones."""
        view = copy.copy(self)
        view.shared = kv
        return view

    def attend_shared(self, q: Array, **how: Any) -> Array:
        """Attention to the shared keys and values of layers with the same window."""
        return self.attend(q, *self.shared[how["window"]], **how)

    def finish(self, layers: PyTree) -> None:
        return None

    def attend(self, q: Array, k: Array, v: Array, *, stride: int = 1, **how: Any) -> Array:
        """Attention as `kernels.attend` describes it: `causal`, `window`, `scale`.

        With a stride, keys and values are those of `cells`.
        """
        where = dict(document=self.document, first=0, stride=stride)
        if self.left is not None:
            self.left.append((k, v))
        if stride == 1:
            return attend(q, k, v, slots=self.document, **where, **how)
        cells = Cells(self.position, self.document, stride)
        return attend(q, k, v, slots=cells.documents, phase=cells.phase, **where, **how)

    def cells(self, x: Array, stride: int) -> Array:
        """Inputs at the end of each cell of `stride` positions, [batch, slots, ...]."""
        return x if stride == 1 else Cells(self.position, self.document, stride).take(x)

    def coarser(self, stride: int) -> "Packed":
        """The context of cells of `stride` positions each: cells of those, and their last inputs.

        A cell's position is its number in its document. Attention is not for it: queries are at
        the positions of the context that a block was given.
        """
        cells, view = Cells(self.position, self.document, stride), copy.copy(self)
        view.position, view.document = cells.take(self.position) // stride, cells.documents
        return view

    def last(self, x: Array, n: int) -> tuple[Array, ...]:
        """The last n inputs of the document, oldest first and the own one last, as `x` is.

        Zeros stand for those before its beginning.
        """
        padded = jnp.pad(x, ((0, 0), (n - 1, 0)) + ((0, 0),) * (x.ndim - 2))
        return recurrence.last(padded, n, self.position)

    def before(self, x: Array, n: int) -> Array:
        """The last n inputs of the document, as one array: [batch, seq, n, ...]."""
        return jnp.stack(self.last(x, n), axis=2)

    def scan(self, combine: Callable[[PyTree, PyTree], PyTree], elements: PyTree) -> PyTree:
        """Prefixes x_1 ... x_t along each document, by an associative `combine(earlier, later)`.

        Arrays of elements are [batch, seq, ...]. h_t = a_t h_{t-1} + b_t is the second part of
        `scan(recurrence.linear, (a, b))`.
        """
        return recurrence.scan(combine, elements, begins=self.position == 0)

    def auxiliary(self, name: str, total: ArrayLike, weight: ArrayLike) -> None:
        """Report a metric or an auxiliary loss: its sum over positions, and what that is of.

        Both are sums, so that layers, microbatches and devices add up; what is reported twice
        under one name is added. Not for use inside the cell of `recur`.
        """
        pair = (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32))
        self.reported = added(self.reported, {name: pair})

    def recur(self, cell: Callable, start: PyTree, x: Array, *, remat: bool = False) -> Array:
        """Run `cell(state, x) -> (state, y)` along each document, from `start` at its beginning.

        With `remat` only states and outputs are saved, and the rest of a cell is made again where
        the backward pass needs it: one loop there and one back, for a cell that is cheap beside
        the latency of a round.
        """
        start = recurrence.per_row(start, x)

        def step(state, now):
            x, position = now
            with inside(None):  # what is reported in a loop cannot leave it
                return cell(recurrence.where(position == 0, start, state), x)

        if not remat:
            return recurrence.along_time(step, start, (x, self.position))[1]
        remade = jax.checkpoint(step, prevent_cse=False)

        def named(state, now):
            return remade(checkpoint_name(state, recurrence.STATE), now)

        y = recurrence.along_time(named, start, (x, self.position))[1]
        return checkpoint_name(y, recurrence.STATE)

    def chunked(self, function: Callable, start: PyTree, x: PyTree) -> Array:
        """A recurrence of arrays [batch, seq, ...], computed whole: in chunks of positions, say.

        `function(state, x, begins, counts)` is the last state and what each position gives. It
        starts afresh where `begins` is true, and what does not count leaves the state alone.
        """
        start = recurrence.per_row(start, self.position)
        counts = self.document >= 0
        return function(start, x, begins=self.position == 0, counts=counts)[1]


def enter(batch: dict[str, Array], cache: KVCache | None) -> Packed | DecodeContext:
    """The context for a call of a model."""
    return Packed(batch) if cache is None else DecodeContext(batch, cache)
