"""The LM head, from hidden states to the vocabulary: the only place where logits exist.

A full `[tokens, vocab]` array is the largest of a language model by far, so in training it is never
there: losses are fused with the matmul, on tiles of a few thousand tokens, and so are their
gradients. With logits z = W h and a loss ℓ(z) per token, a tile adds

    dh = Wᵀ ∂ℓ/∂z    dW = Σ ∂ℓ/∂z hᵀ    where of cross-entropy ∂ℓ/∂z = softmax(z) − onehot(target)
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.devices.axes import (
    batch_shards,
    device,
    gathered,
    layout,
    reduce_scattered,
    shard,
    split_over,
)
from windlass.devices.sketch import on_one_gpu
from windlass.layers.embedding import TokenRows, TokenTable
from windlass.layers.initializers import Initializer, small
from windlass.layers.softmax import log_z, pick, statistics

TILE_TOKENS = 4096  # per device: full speed, and 1.2 GB of bfloat16 at a vocabulary of 152k
GROUP = 64  # ids whose maximum is looked at first, for the highest of all

# Per token of a tile: its share of the loss, weighted, and whatever else is to be summed.
TileSums = tuple[Float[Array, "..."], dict[str, Float[Array, "..."]]]
TileLoss = Callable[[Float[Array, "... vocab"], dict[str, Array]], TileSums]


class Candidates(NamedTuple):
    """Candidates for each token: their ids and logits, and log Σ exp z over the vocabulary."""

    ids: Int[Array, "*tokens k"]
    logits: Float[Array, "*tokens k"]
    log_z: Float[Array, "*tokens"]


class Head(TokenTable):
    weight: Float[Array, "vocab embed"]
    tuned: TokenRows | None
    cap: float | None = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        weight: Float[Array, "vocab embed"],
        *,
        cap: float | None = None,  # soft cap of logits; None: there is none
    ):
        self.weight, self.tuned, self.cap = weight, None, cap

    @staticmethod
    def init(
        sizes: dict[str, int], *, initializer: Initializer = small, key: PRNGKeyArray
    ) -> "Head":
        return Head(initializer(key, (sizes["vocab"], sizes["embed"]), sizes["embed"]))

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("vocab", "embed")}

    @jax.named_scope("head")
    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """All logits, in float32: for generation, a few positions at a time."""
        weight = gathered(self.weight.astype(hidden.dtype), self.axes["weight"])
        out = layout("batch seq vocab", (*hidden.shape[:2], weight.shape[0]))
        logits = jnp.einsum("bse,ve->bsv", hidden, weight, out_sharding=out)
        return capped(logits.astype(jnp.float32), self.cap)

    @jax.named_scope("head")
    def reduce(
        self,
        loss: Callable[..., TileSums],
        hidden: Float[Array, "batch seq embed"],
        columns: dict[str, Array],
        *,
        constants: PyTree = None,
        statistics_of: str | None = None,
        tile_tokens: int = TILE_TOKENS,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """The sum of a per-token loss of the logits, and of what else `loss` reports.

        `loss` is called on float32 logits of one tile with the same tokens of every column
        (`[batch, seq, ...]`, all zero where a tile reaches beyond the row: it must be weighted by
        one of them). Its gradient is taken where it is computed, so that no tile is computed twice;
        the backward pass only scales it. The sums carry no gradient.

        `constants`, where there are any, are its last argument in every tile: a weight that
        changes from step to step, or the head of a frozen model. They have no gradient. With
        `statistics_of` its third is the `Statistics` of the tile with that column's targets.
        """
        axes, dtype, cap = self.axes["weight"], hidden.dtype, self.cap
        tiles = _Tiles(hidden.shape, tile_tokens)
        # What float16 cannot hold before the backward pass scales it must wait in float32.
        gradient_dtype = jnp.float32 if dtype == jnp.float16 else dtype

        def value(hidden, weight, columns, constants):
            weight = gathered(weight, axes)
            of_tile = _with(loss, constants, statistics_of, dtype, cap)

            def add(sums, tile):
                values = of_tile(tile_logits(tile[0], weight), tile[1])
                return _add(sums, values), None

            zeros = _zeros(of_tile, tiles, hidden, weight, columns)
            sums, _ = jax.lax.scan(add, zeros, (tiles.cut(hidden), tiles.cut(columns)))
            return _over_shards(sums)

        def value_and_gradient(hidden, weight, columns, constants, is_trained):
            stored, weight = jax.typeof(weight), gathered(weight, axes)
            in_turn = is_trained and tiles.shards > 1
            of_tile = _with(loss, constants, statistics_of, dtype, cap)

            def of_one(tile):
                h, own = tile
                d_logits, values = _gradient(of_tile, tile_logits(h, weight), own)
                # Both products in the precision of the model: a float32 factor would leave the
                # fast paths of every accelerator.
                d_logits, back = _in_range(d_logits, h.dtype)
                d_h = jnp.einsum(
                    "gbsv,ve->gbse",
                    d_logits,
                    weight,
                    preferred_element_type=gradient_dtype,
                    out_sharding=_rows(h),
                )
                if in_turn:
                    # The gathered weight is free before its gradient takes as much. A barrier would
                    # be gone when the compiler orders what it computes.
                    h = h + (0 * d_h[:, :1, :1, :1]).astype(h.dtype)
                more = _weight_gradient(d_logits, h)
                if back is not None:
                    d_h, more = d_h * back, more * back[:, 0]
                return values, more, d_h

            def add(carry, tile):
                sums, d_weight = carry
                values, more, d_h = of_one(tile)
                return (_add(sums, values), d_weight + more), d_h

            def from_zeros():
                # One accumulator per group of devices that shares rows: reduced once, at the end.
                shape = (tiles.shards, *weight.shape)
                d_weight = jnp.zeros(
                    shape, jnp.float32, out_sharding=layout(("batch", "vocab", ""), shape)
                )
                zeros = _zeros(of_tile, tiles, hidden, weight, columns)
                cut = tiles.cut(hidden), tiles.cut(columns)
                return jax.lax.scan(add, (zeros, d_weight), cut)

            def from_first():
                """The same, without zeros that would be written, and read with the first tile."""
                zeros = _zeros(of_tile, tiles, hidden, weight, columns)
                cut = tiles.cut(hidden), tiles.cut(columns)
                values, d_weight, d_h = of_one(jax.tree.map(lambda x: x[0], cut))
                rest = jax.tree.map(lambda x: x[1:], cut)
                carry, d_hidden = jax.lax.scan(add, (_add(zeros, values), d_weight), rest)
                return carry, jnp.concatenate([d_h[None], d_hidden])

            (sums, d_weight), d_hidden = from_first() if on_one_gpu() else from_zeros()
            d_weight = reduce_scattered(d_weight.astype(gradient_dtype), axes, stored)
            gradients = tiles.join(d_hidden), d_weight
            if in_turn:
                # At once: libtpu would keep logits, or the whole gradient, to the step's end.
                gradients = jax.lax.optimization_barrier(gradients)
            return _over_shards(sums), gradients

        @jax.custom_vjp
        def total(hidden, weight, columns, constants):
            return value(hidden, weight, columns, constants)

        def forward(*inputs):
            hidden, weight, columns, constants = _values(inputs)
            is_trained = inputs[1].perturbed
            return value_and_gradient(hidden, weight, columns, constants, is_trained)

        def backward(gradients, cotangents):
            scale = cotangents[0]
            d_hidden, d_weight = ((g * scale.astype(g.dtype)).astype(dtype) for g in gradients)
            return d_hidden, d_weight, None, None

        total.defvjp(forward, backward, symbolic_zeros=True)
        summed, others = total(hidden, self.weight.astype(dtype), columns, constants)
        return summed, jax.tree.map(jax.lax.stop_gradient, others)

    @jax.named_scope("head")
    def log_probabilities(
        self,
        hidden: Float[Array, "batch seq embed"],
        targets: Int[Array, "batch seq"],
        *,
        tile_tokens: int = TILE_TOKENS,
    ) -> Float[Array, "batch seq"]:
        """The log-probability of one target per token, in float32: log p = z_target − logsumexp(z).

        Whoever sums these over an answer before a loss knows the gradient of each only afterwards,
        so the backward pass computes every tile again, with that gradient as the tokens' weight.
        """

        def values(hidden, weight, targets):
            weight = gathered(weight.astype(hidden.dtype), self.axes["weight"])
            tiles = _Tiles(hidden.shape, tile_tokens)

            def one(_, tile):
                logits = tile_logits(tile[0], weight, self.cap)
                return None, _log_probability(logits, tile[1])

            cut = tiles.cut(hidden), tiles.cut(targets)
            return tiles.join(jax.lax.scan(one, None, cut)[1])

        def forward(*inputs):
            hidden, weight, targets = _values(inputs)
            trained, frozen = (weight, None) if inputs[1].perturbed else (None, weight)
            return values(hidden, weight, targets), (hidden, trained, frozen, targets)

        def backward(saved, cotangent):
            hidden, trained, frozen, targets = saved
            columns = {"targets": targets, "weight": cotangent}

            def weighted(hidden, trained):
                head = Head(frozen if trained is None else trained, cap=self.cap)
                return head.reduce(_weighted, hidden, columns, tile_tokens=tile_tokens)[0]

            return *jax.grad(weighted, (0, 1))(hidden, trained), None

        function = jax.custom_vjp(values)
        function.defvjp(forward, backward, symbolic_zeros=True)
        return function(hidden, self.weight, targets)

    @jax.named_scope("head")
    def candidates(
        self,
        hidden: Float[Array, "batch seq embed"],
        k: int,
        ranks: Int[Array, "batch seq n"],
        *,
        tile_tokens: int = TILE_TOKENS,
    ) -> Candidates:
        """The k highest logits of each token, descending, then those of n further ids.

        These are given by their ranks among all ids that are not of the k highest.
        """
        weight = gathered(self.weight.astype(hidden.dtype), self.axes["weight"])
        tiles = _Tiles(hidden.shape, tile_tokens)

        def one(_, tile):
            logits, own = tile_logits(tile[0], weight, self.cap), tile[1]
            ids, values = top_k(logits, k)
            if own.shape[-1]:
                others = outside(ids, own)
                values = jnp.concatenate([values, pick_several(logits, others)], axis=-1)
                ids = jnp.concatenate([ids, others], axis=-1)
            return None, Candidates(ids, values, log_z(logits))

        _, found = jax.lax.scan(one, None, (tiles.cut(hidden), tiles.cut(ranks)))
        return jax.tree.map(tiles.join, found)


class ScoreHead(Head):
    """A head of a few scores in the place of the vocabulary's logits, as a reward model has."""

    def __init__(self, weight: Float[Array, "k embed"]):
        super().__init__(weight)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("", "embed")}

    @jax.named_scope("head")
    def logits(self, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq k"]:
        """Scores of every position, in float32."""
        weight = gathered(self.weight.astype(hidden.dtype), self.axes["weight"])
        out = layout("batch seq .", (*hidden.shape[:2], weight.shape[0]))
        return jnp.einsum("bse,ke->bsk", hidden, weight, out_sharding=out).astype(jnp.float32)


class _Tiles:
    """Tiles of a batch, cut along the sequence so that every device works on every tile.

    A tile is `[shards, rows, seq, ...]`: the groups of devices that hold rows of their own come
    first, so that nothing is summed over them before the end.
    """

    def __init__(self, shape: tuple[int, ...], tokens: int):
        self.batch, self.seq = shape[:2]
        self.shards = batch_shards(self.batch)
        self.rows = self.batch // self.shards
        self.length = min(self.seq, max(1, tokens // self.rows))
        self.count = -(-self.seq // self.length)

    def cut(self, tree):
        def each(x):
            rest = x.shape[2:]
            padding = [(0, 0), (0, self.count * self.length - self.seq), *[(0, 0)] * len(rest)]
            x = jnp.pad(x, padding)
            shape = (self.shards, self.rows, self.count, self.length, *rest)
            out = layout(("batch", *[""] * (len(shape) - 1)), shape)
            return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=out), 2, 0)

        return jax.tree.map(each, tree)

    def join(self, x: Array) -> Array:
        whole = (self.shards, self.rows, self.count * self.length, *x.shape[4:])
        x = jnp.moveaxis(x, 0, 2).reshape(whole)[:, :, : self.seq]
        shape = (self.batch, self.seq, *x.shape[3:])
        out = layout(("batch", *[""] * (len(shape) - 1)), shape)
        return jnp.reshape(x, shape, out_sharding=out)


def _values(inputs: PyTree) -> PyTree:
    """Arguments of a forward pass, without the word on which of them have a gradient."""
    return jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))


def pick_several(
    logits: Float[Array, "... vocab"], candidates: Int[Array, "... k"]
) -> Float[Array, "... k"]:
    """The logits of k candidates per token, each device looking in its shard of the vocabulary."""
    axis = split_over("vocab", logits.shape[-1])

    def local(logits, candidates):
        size = logits.shape[-1]
        first = 0 if axis is None else jax.lax.axis_index(axis) * size
        index = candidates - first
        picked = jnp.take_along_axis(logits, jnp.clip(index, 0, size - 1), axis=-1)
        picked = jnp.where((index >= 0) & (index < size), picked, 0.0)
        return picked if axis is None else jax.lax.psum(picked, axis)

    rows = layout(("batch",), logits.shape[:1])
    if rows is None:
        return local(logits, candidates)
    inner = [None] * (logits.ndim - 2)
    return jax.shard_map(
        local,
        in_specs=(PartitionSpec(*rows, *inner, axis), PartitionSpec(*rows, *inner, None)),
        out_specs=PartitionSpec(*rows, *inner, None),
    )(logits, shard(candidates, " ".join(["batch", *"." * (candidates.ndim - 1)])))


def top_k(
    logits: Float[Array, "... vocab"], k: int
) -> tuple[Int[Array, "... k"], Float[Array, "... k"]]:
    """The ids and values of the k highest logits, descending; of equal ones the lowest id first.

    Each device looks in its shard of the vocabulary, and what all found is gathered in the order
    of their ids: the same candidates on any mesh.
    """
    axis = split_over("vocab", logits.shape[-1])

    def local(logits):
        size = logits.shape[-1]
        ids, values = _highest(logits, min(k, size))
        if axis is None:
            return ids, values
        ids = ids + jax.lax.axis_index(axis) * size
        last = logits.ndim - 1
        ids, values = (jax.lax.all_gather(x, axis, axis=last, tiled=True) for x in (ids, values))
        values, which = jax.lax.top_k(values, k)
        return jnp.take_along_axis(ids, which, axis=-1), values

    rows = layout(("batch",), logits.shape[:1])
    if rows is None:
        return local(logits)
    inner = [None] * (logits.ndim - 2)
    whole = PartitionSpec(*rows, *inner, None)
    return jax.shard_map(
        local,
        in_specs=PartitionSpec(*rows, *inner, axis),
        out_specs=(whole, whole),
        check_vma=False,  # after the all-gather every device has the same
    )(logits)


def _highest(logits: Array, k: int) -> tuple[Array, Array]:
    """Top k on one device: of the k groups of ids with the highest maxima, which hold all of them.

    A device sorts to find them, and this sorts size/g + k g numbers in place of size.
    """
    size, lead = logits.shape[-1], logits.shape[:-1]
    groups = -(-size // GROUP)
    if groups <= 2 * k:
        values, ids = jax.lax.top_k(logits, k)
        return ids, values
    padding = [(0, 0)] * len(lead) + [(0, groups * GROUP - size)]
    grouped = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*lead, groups, GROUP)
    # In the order of the ids: of equal logits the lowest id is still the first.
    which = jnp.sort(jax.lax.top_k(jnp.max(grouped, axis=-1), k)[1], axis=-1)
    ids = which[..., None] * GROUP + jnp.arange(GROUP)
    some = jnp.take_along_axis(grouped, which[..., None], axis=-2).reshape(*lead, k * GROUP)
    values, places = jax.lax.top_k(some, k)
    return jnp.take_along_axis(ids.reshape(*lead, k * GROUP), places, axis=-1), values


def outside(ids: Int[Array, "... k"], ranks: Int[Array, "... n"]) -> Int[Array, "... n"]:
    """The ids with these ranks, from 0, among all that are not in `ids`.

    With t = sort(ids), the one of rank r is r + #{j : t_j − j ≤ r}.
    """
    skipped = jnp.sort(ids, axis=-1) - jnp.arange(ids.shape[-1])
    before = skipped[..., None, :] <= ranks[..., :, None]
    return ranks + jnp.sum(before, axis=-1, dtype=ranks.dtype)


def capped(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Soft-capped logits, cap · tanh(z / cap); of no cap they are what they were."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def tile_logits(
    h: Float[Array, "shards rows seq embed"],
    weight: Float[Array, "vocab embed"],
    cap: float | None = None,
) -> Float[Array, "shards rows seq vocab"]:
    """Float32 logits of a tile, of the model's own hidden states or of a frozen one's."""
    shape = (*h.shape[:3], weight.shape[0])
    out = layout(("batch", "", "", "vocab"), shape)
    logits = jnp.einsum("gbse,ve->gbsv", h, weight, out_sharding=out)
    return capped(logits.astype(jnp.float32), cap)


def _log_probability(logits, targets):
    return pick(logits, targets) - log_z(logits)


def _weighted(logits, columns):
    return columns["weight"] * _log_probability(logits, columns["targets"]), {}


def _with(
    loss: Callable,
    constants: PyTree,
    statistics_of: str | None,
    dtype: Any,
    cap: float | None,
) -> TileLoss:
    def of_tile(logits, columns):
        logits = capped(logits, cap)
        given = [] if statistics_of is None else [statistics(logits, columns[statistics_of], dtype)]
        given += [] if constants is None else [constants]
        return loss(logits, columns, *given)

    return of_tile


def _gradient(loss, logits, columns):
    def summed(logits):
        values = loss(logits, columns)
        return jnp.sum(values[0]), values

    return jax.grad(summed, has_aux=True)(logits)


def _in_range(d_logits, dtype):
    """A tile's gradient in the precision of the model, and in float16 what undoes its scaling.

    The probabilities of most tokens are zero in float16. So each group of devices brings its
    largest entry near the end of the range, whatever the scale that is to come.
    """
    if dtype != jnp.float16:
        return d_logits.astype(dtype), None
    largest = jnp.max(jnp.abs(d_logits), axis=(1, 2, 3), keepdims=True)
    scale = 2.0**15 / jnp.maximum(largest, 1e-30)
    return (d_logits * scale).astype(dtype), 1 / scale


def _add(sums, values):
    return jax.tree.map(lambda total, x: total + jnp.sum(x, axis=(1, 2)), sums, values)


def _zeros(loss, tiles, hidden, weight, columns):
    def first(hidden, weight, columns):
        h, own = jax.tree.map(lambda x: x[0], (tiles.cut(hidden), tiles.cut(columns)))
        return loss(tile_logits(h, weight), own)

    shapes = jax.eval_shape(first, hidden, weight, columns)
    out = layout(("batch",), (tiles.shards,))
    return jax.tree.map(lambda x: jnp.zeros(tiles.shards, jnp.float32, out_sharding=out), shapes)


def _over_shards(sums):
    return jax.tree.map(lambda x: jnp.sum(x), sums)


def _rows(x):
    return layout(("batch", *[""] * (x.ndim - 1)), x.shape)


def _weight_gradient(d_logits: Float[Array, "shards rows seq vocab"], h: Array) -> Array:
    """The gradient of a head's weight by the tokens of a tile, a sum for each group of devices."""
    if device().platform != "cpu":
        return jnp.einsum("gbsv,gbse->gve", d_logits, h, preferred_element_type=jnp.float32)
    # With a single axis of tokens, or XLA for CPUs makes the gradient of the logits a second time,
    # transposed.
    d_logits, h = _by_token(d_logits, "vocab"), _by_token(h, "")
    return jnp.einsum("gtv,gte->gve", d_logits, h, preferred_element_type=jnp.float32)


def _by_token(x: Float[Array, "shards rows seq last"], last: str) -> Float[Array, "shards t last"]:
    """A tile with one axis for the tokens of each group of devices."""
    shape = (x.shape[0], x.shape[1] * x.shape[2], x.shape[3])
    return jnp.reshape(x, shape, out_sharding=layout(("batch", "", last), shape))
