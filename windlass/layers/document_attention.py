"""Flash attention within the documents of packed rows, on an NVIDIA GPU.

A block of queries reads the keys from the beginning of the document of its first query, a block of
keys the queries up to the end of the document of its last: of short documents little is computed,
however many there are.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from windlass.devices.triton import called, dot, shares

LEAST = -(2.0**100)  # logit of what is not seen; a power of 2, of which no product is rounded
LOG2_E = math.log2(math.e)


class AttentionBlock(NamedTuple):
    """Queries and keys that a program of a kernel has at once, and its threads."""

    queries: int
    keys: int
    warps: int
    stages: int  # of keys, or of queries, that are under way


class AttentionBlocks(NamedTuple):
    """Blocks of the three kernels."""

    forward: AttentionBlock
    of_queries: AttentionBlock
    of_keys: AttentionBlock


# The fastest on an H200 (benchmarks/gpu_blocks.py), by the widest heads that they are for.
BLOCKS = {
    64: AttentionBlocks(
        AttentionBlock(64, 64, 4, 2), AttentionBlock(64, 64, 4, 2), AttentionBlock(64, 64, 4, 3)
    ),
    128: AttentionBlocks(
        AttentionBlock(64, 64, 4, 3), AttentionBlock(64, 32, 4, 3), AttentionBlock(64, 64, 4, 2)
    ),
}
WHOLE = 64  # rows are padded to a multiple of this
NARROWEST, WIDEST = 16, max(BLOCKS)  # heads; those between powers of 2 are padded


def attend(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq kv_heads dim"],
    v: Float[Array, "batch seq kv_heads dim"],
    document: Int[Array, "batch seq"],
    *,
    scale: float,
    saved_as: str,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads dim"]:
    """Causal attention within documents, each of which is in one piece.

    Padding, which is document -1, is computed with the document before it, and not seen by it.
    What the backward pass takes of the forward pass has the checkpoint name `saved_as`.
    """
    _, length, _, dim = q.shape
    after = -length % WHOLE
    wider = max(NARROWEST, 1 << (dim - 1).bit_length()) - dim
    q, k, v = (jnp.pad(x, ((0, 0), (0, after), (0, 0), (0, wider))) for x in (q, k, v))
    document = jnp.pad(document, ((0, 0), (0, after)), constant_values=-1)
    mixed: Array = _attended(q, k, v, *seen(document, window), scale, saved_as, interpret)
    return mixed[:, :length, :, :dim]


def seen(
    document: Int[Array, "batch seq"], window: int | None = None
) -> tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]]:
    """First position that each query sees, and last one by which each key is seen."""
    length = document.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)
    is_first = jnp.diff(document, axis=1, prepend=document[:, :1] - 1) != 0
    is_first &= (document >= 0) | (at == 0)
    first = jax.lax.cummax(jnp.where(is_first, at, 0), axis=1)
    before = jnp.where(is_first[:, 1:], at[:-1], length - 1)
    last = jnp.pad(before, ((0, 0), (0, 1)), constant_values=length - 1)
    last = jax.lax.cummin(last, axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, at - window + 1), jnp.minimum(last, at + window - 1)
    return first, last


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attended(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    scale: float,
    saved_as: str,
    interpret: bool,
) -> Array:
    return _forward(q, k, v, first, last, scale, saved_as, interpret)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    last: Array,
    scale: float,
    saved_as: str,
    interpret: bool,
):
    mixed, sums = _mixed(q, k, v, first, scale, interpret)
    mixed, sums, first, last = (checkpoint_name(x, saved_as) for x in (mixed, sums, first, last))
    return mixed, (q, k, v, mixed, sums, first, last)


def _backward(scale: float, _: str, interpret: bool, saved: tuple[Array, ...], d: Array):
    q, k, v, mixed, sums, first, last = saved
    d_q, inner = _of_queries(q, k, v, mixed, d, sums, first, scale, interpret)
    d_k, d_v = _of_keys(q, k, v, d, sums, inner, last, scale, interpret)
    return d_q, d_k, d_v, None, None


_attended.defvjp(_forward, _backward)


def _blocks(q: Array) -> AttentionBlocks:
    return next(blocks for widest, blocks in BLOCKS.items() if q.shape[-1] <= widest)


def _mixed(
    q: Array, k: Array, v: Array, first: Array, scale: float, interpret: bool
) -> tuple[Array, Array]:
    """Values by softmax, and the logarithms to base 2 of its sums."""
    from jax.experimental import pallas as pl

    block, factor = _blocks(q).forward, scale * LOG2_E

    def document_attention(q_ref, k_ref, v_ref, first_ref, out_ref, sums_ref):
        q, first = q_ref[...], first_ref[...]
        at = _at(pl, block.queries)
        query = at + jnp.arange(block.queries)

        def one(number, carry, is_edge):
            most, total, mixed = carry
            here = pl.ds(number * block.keys, block.keys)
            logits = dot(q, k_ref[here, :], over=(1, 1))
            if is_edge:
                key = number * block.keys + jnp.arange(block.keys)
                is_seen = _is_seen(query[:, None], key[None], first[:, None])
                logits = jnp.where(is_seen, logits, LEAST)
            # A block of which a query sees nothing has no share beside that with itself.
            more = jnp.maximum(most, jnp.max(logits, axis=1))
            own = shares(logits, factor, (more * factor)[:, None], interpret=interpret)
            less = shares(most, factor, more * factor, interpret=interpret)
            mixed = mixed * less[:, None] + dot(own.astype(q.dtype), v_ref[here, :])
            return more, total * less + jnp.sum(own, axis=1), mixed

        zeros = jnp.zeros(block.queries, jnp.float32)
        carry = zeros + LEAST, zeros, jnp.zeros(q.shape, jnp.float32)
        begin, end = _keys(pl, first_ref, at, block)
        # Of the blocks between, queries see all: they need no mask.
        inside = pl.cdiv(first_ref[block.queries - 1], block.keys)
        outside = jnp.maximum(inside, (at + 1) // block.keys)

        def at_edge(number, carry):
            number += jnp.where(number < inside, 0, outside - inside)
            return one(number, carry, is_edge=True)

        carry = jax.lax.fori_loop(begin, end - (outside - inside), at_edge, carry)
        between = functools.partial(one, is_edge=False)
        most, total, mixed = jax.lax.fori_loop(inside, outside, between, carry)
        out_ref[...] = (mixed / total[:, None]).astype(q.dtype)
        sums_ref[...] = most * factor + jnp.log2(total)

    specs = _Specs(q, k, block)
    return called(
        document_attention,
        grid=specs.by_queries,
        warps=block.warps,
        stages=block.stages,
        in_specs=[specs.queries, specs.row, specs.row, specs.of_queries],
        out_specs=[specs.queries, specs.sums],
        out_shape=[_like(q), specs.sums_shape],
        interpret=interpret,
    )(q, k, v, first)


def _of_queries(
    q: Array,
    k: Array,
    v: Array,
    mixed: Array,
    d: Array,
    sums: Array,
    first: Array,
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """Gradients by queries, and the products of output and gradient."""
    from jax.experimental import pallas as pl

    block, factor = _blocks(q).of_queries, scale * LOG2_E

    def document_queries(
        q_ref, k_ref, v_ref, mixed_ref, d_ref, sums_ref, first_ref, out_ref, inner_ref
    ):
        q, d, sums, first = q_ref[...], d_ref[...], sums_ref[...], first_ref[...]
        at = _at(pl, block.queries)
        query = at + jnp.arange(block.queries)
        product = mixed_ref[...].astype(jnp.float32) * d.astype(jnp.float32)
        inner = jnp.sum(product, axis=1)
        inner_ref[...] = inner

        def one(number, d_q):
            here = pl.ds(number * block.keys, block.keys)
            key, keys = number * block.keys + jnp.arange(block.keys), k_ref[here, :]
            own = shares(dot(q, keys, over=(1, 1)), factor, sums[:, None], interpret=interpret)
            own = jnp.where(_is_seen(query[:, None], key[None], first[:, None]), own, 0)
            d_logits = own * (dot(d, v_ref[here, :], over=(1, 1)) - inner[:, None])
            return d_q + dot(d_logits.astype(q.dtype), keys)

        zeros = jnp.zeros(q.shape, jnp.float32)
        d_q = jax.lax.fori_loop(*_keys(pl, first_ref, at, block), one, zeros)
        out_ref[...] = (d_q * scale).astype(q.dtype)

    specs = _Specs(q, k, block)
    return called(
        document_queries,
        grid=specs.by_queries,
        warps=block.warps,
        stages=block.stages,
        in_specs=[
            *(specs.queries, specs.row, specs.row, specs.queries, specs.queries),
            *(specs.sums, specs.of_queries),
        ],
        out_specs=[specs.queries, specs.sums],
        out_shape=[_like(q), specs.sums_shape],
        interpret=interpret,
    )(q, k, v, mixed, d, sums, first)


def _of_keys(
    q: Array,
    k: Array,
    v: Array,
    d: Array,
    sums: Array,
    inner: Array,
    last: Array,
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """Gradients by keys and values, of all heads of queries that share them."""
    from jax.experimental import pallas as pl

    block, factor = _blocks(q).of_keys, scale * LOG2_E
    group = q.shape[2] // k.shape[2]

    def document_keys(k_ref, v_ref, q_ref, d_ref, sums_ref, inner_ref, last_ref, d_k_ref, d_v_ref):
        k, v, last = k_ref[...], v_ref[...], last_ref[...]
        at = pl.program_id(2) * block.keys
        key = at + jnp.arange(block.keys)

        def one(number, carry):
            d_k, d_v = carry
            head, number = number % group, number // group
            here = pl.ds(number * block.queries, block.queries)
            query = number * block.queries + jnp.arange(block.queries)
            q, d = q_ref[here, head, :], d_ref[here, head, :]
            sums, inner = sums_ref[head, here], inner_ref[head, here]
            own = shares(dot(k, q, over=(1, 1)), factor, sums[None], interpret=interpret)
            own = jnp.where((query >= key[:, None]) & (query <= last[:, None]), own, 0)
            d_v = d_v + dot(own.astype(d.dtype), d)
            d_logits = own * (dot(v, d, over=(1, 1)) - inner[None])
            return d_k + dot(d_logits.astype(q.dtype), q), d_v

        zeros = jnp.zeros(k.shape, jnp.float32)
        end = last_ref[block.keys - 1] // block.queries + 1
        numbers = at // block.queries * group, end * group
        d_k, d_v = jax.lax.fori_loop(*numbers, one, (zeros, zeros))
        d_k_ref[...] = (d_k * scale).astype(k.dtype)
        d_v_ref[...] = d_v.astype(v.dtype)

    specs = _Specs(q, k, block)
    return called(
        document_keys,
        grid=specs.by_keys,
        warps=block.warps,
        stages=block.stages,
        in_specs=[
            *(specs.keys, specs.keys, specs.heads, specs.heads),
            *(specs.all_sums, specs.all_sums, specs.of_keys),
        ],
        out_specs=[specs.keys, specs.keys],
        out_shape=[_like(k), _like(v)],
        interpret=interpret,
    )(k, v, q, d, sums, inner, last)


def _at(pl: Any, queries: int) -> Array:
    """Position of a program's queries: the last, which see most keys, are the first to start."""
    return (pl.num_programs(2) - 1 - pl.program_id(2)) * queries


def _keys(pl: Any, first: Any, at: Array, block: AttentionBlock) -> tuple[Array, Array]:
    """Blocks of keys that queries from a position on see, [begin, end)."""
    return first[0] // block.keys, pl.cdiv(at + block.queries, block.keys)


def _is_seen(query: Array, key: Array, first: Array) -> Array:
    return (key <= query) & (key >= first)


class _Specs:
    """Parts of each array that a program of a kernel has, by row, head and block."""

    def __init__(self, q: Array, k: Array, block: AttentionBlock):
        from jax.experimental import pallas as pl

        batch, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        group = heads // kv_heads
        self.by_queries = batch, heads, length // block.queries
        self.by_keys = batch, kv_heads, length // block.keys
        self.sums_shape = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        # By blocks of queries from the last, each of a head.
        end = length // block.queries - 1
        self.queries = pl.BlockSpec(
            (None, block.queries, None, dim), lambda b, h, i: (b, end - i, h, 0)
        )
        self.row = pl.BlockSpec((None, length, None, dim), lambda b, h, i: (b, 0, h // group, 0))
        self.of_queries = pl.BlockSpec((None, block.queries), lambda b, h, i: (b, end - i))
        self.sums = pl.BlockSpec((None, None, block.queries), lambda b, h, i: (b, h, end - i))
        # By blocks of keys, each of a head of theirs and of all heads of queries that it has.
        self.keys = pl.BlockSpec((None, block.keys, None, dim), lambda b, h, i: (b, i, h, 0))
        self.heads = pl.BlockSpec((None, length, group, dim), lambda b, h, i: (b, 0, h, 0))
        self.of_keys = pl.BlockSpec((None, block.keys), lambda b, h, i: (b, i))
        self.all_sums = pl.BlockSpec((None, group, length), lambda b, h, i: (b, h, 0))


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
