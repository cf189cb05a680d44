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
from jaxtyping import Array, Float, Int

from windlass.devices.triton import called, dot

LEAST = -1e30  # logit of what is not seen


class Block(NamedTuple):
    """Queries and keys that a program of a kernel has at once, and its threads."""

    queries: int
    keys: int
    warps: int
    stages: int  # of keys, or of queries, that are under way


MIXING, OF_QUERIES, OF_KEYS = (Block(128, 64, 4, 3) for _ in range(3))  # of the three kernels


def fits(length: int, head_dim: int) -> bool:
    """Return True if rows are whole blocks, and heads as wide as a kernel takes."""
    blocks = MIXING, OF_QUERIES, OF_KEYS
    is_whole = all(length % size == 0 for block in blocks for size in block[:2])
    return is_whole and head_dim in (32, 64, 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attended(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq kv_heads dim"],
    v: Float[Array, "batch seq kv_heads dim"],
    document: Int[Array, "batch seq"],
    scale: float,
    interpret: bool = False,
) -> Float[Array, "batch seq heads dim"]:
    """Causal attention within documents, each of which is in one piece.

    Padding, which is document -1, is computed with the document before it, and not seen by it.
    """
    return _forward(q, k, v, document, scale, interpret)[0]


def _forward(q: Array, k: Array, v: Array, document: Array, scale: float, interpret: bool):
    from jax.ad_checkpoint import checkpoint_name

    from windlass.layers.kernels import MIXED

    begin, end = bounds(document)
    mixed, sums = _mixed(q, k, v, begin, scale, interpret)
    mixed, sums = (checkpoint_name(x, MIXED) for x in (mixed, sums))
    return mixed, (q, k, v, mixed, sums, begin, end)


def _backward(scale: float, interpret: bool, saved: tuple[Array, ...], d: Array):
    q, k, v, mixed, sums, begin, end = saved
    d_q, inner = _of_queries(q, k, v, mixed, d, sums, begin, scale, interpret)
    d_k, d_v = _of_keys(q, k, v, d, sums, inner, begin, end, scale, interpret)
    return d_q, d_k, d_v, None


attended.defvjp(_forward, _backward)


def bounds(document: Int[Array, "batch seq"]) -> tuple[Array, Array]:
    """Positions of the first and of the last token of the document of each position."""
    length = document.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)
    is_first = jnp.diff(document, axis=1, prepend=document[:, :1] - 1) != 0
    is_first &= (document >= 0) | (at == 0)
    begin = jax.lax.cummax(jnp.where(is_first, at, 0), axis=1)
    before = jnp.where(is_first[:, 1:], at[:-1], length - 1)
    last = jnp.pad(before, ((0, 0), (0, 1)), constant_values=length - 1)
    return begin, jax.lax.cummin(last, axis=1, reverse=True)


def _mixed(
    q: Array, k: Array, v: Array, begin: Array, scale: float, interpret: bool
) -> tuple[Array, Array]:
    """Values by softmax, and the logarithms to base 2 of its sums."""
    from jax.experimental import pallas as pl

    sizes = MIXING

    def document_attention(q_ref, k_ref, v_ref, begin_ref, out_ref, sums_ref):
        q, first, block = q_ref[...], begin_ref[...], pl.program_id(2)
        query = block * sizes.queries + jnp.arange(sizes.queries)

        def one(number, carry):
            most, total, mixed = carry
            here = pl.ds(number * sizes.keys, sizes.keys)
            logits = dot(q, k_ref[here, :], over=(1, 1)) * (scale * math.log2(math.e))
            seen = _seen(query[:, None], first[:, None], number, sizes.keys)
            logits = jnp.where(seen, logits, LEAST)
            more = jnp.maximum(most, jnp.max(logits, axis=1))
            shares = jnp.where(seen, jnp.exp2(logits - more[:, None]), 0)
            less = jnp.exp2(most - more)
            mixed = mixed * less[:, None] + dot(shares.astype(q.dtype), v_ref[here, :])
            return more, total * less + jnp.sum(shares, axis=1), mixed

        zeros = jnp.zeros(sizes.queries, jnp.float32)
        carry = zeros + LEAST, zeros, jnp.zeros(q.shape, jnp.float32)
        blocks = begin_ref[0] // sizes.keys, pl.cdiv((block + 1) * sizes.queries, sizes.keys)
        most, total, mixed = jax.lax.fori_loop(*blocks, one, carry)
        out_ref[...] = (mixed / total[:, None]).astype(q.dtype)
        sums_ref[...] = most + jnp.log2(total)

    specs = _Specs(q, k, sizes)
    return called(
        document_attention,
        grid=specs.by_queries,
        warps=sizes.warps,
        stages=sizes.stages,
        in_specs=[specs.queries, specs.row, specs.row, specs.of_queries],
        out_specs=[specs.queries, specs.sums],
        out_shape=[_like(q), specs.sums_shape],
        interpret=interpret,
    )(q, k, v, begin)


def _of_queries(
    q: Array,
    k: Array,
    v: Array,
    mixed: Array,
    d: Array,
    sums: Array,
    begin: Array,
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """Gradients by queries, and the products of output and gradient."""
    from jax.experimental import pallas as pl

    sizes = OF_QUERIES

    def document_queries(
        q_ref, k_ref, v_ref, mixed_ref, d_ref, sums_ref, begin_ref, out_ref, inner_ref
    ):
        q, d, sums, first = q_ref[...], d_ref[...], sums_ref[...], begin_ref[...]
        block = pl.program_id(2)
        query = block * sizes.queries + jnp.arange(sizes.queries)
        product = mixed_ref[...].astype(jnp.float32) * d.astype(jnp.float32)
        inner = jnp.sum(product, axis=1)
        inner_ref[...] = inner

        def one(number, d_q):
            here = pl.ds(number * sizes.keys, sizes.keys)
            keys = k_ref[here, :]
            logits = dot(q, keys, over=(1, 1)) * (scale * math.log2(math.e))
            seen = _seen(query[:, None], first[:, None], number, sizes.keys)
            shares = jnp.where(seen, jnp.exp2(logits - sums[:, None]), 0)
            d_logits = shares * (dot(d, v_ref[here, :], over=(1, 1)) - inner[:, None])
            return d_q + dot(d_logits.astype(q.dtype), keys)

        blocks = begin_ref[0] // sizes.keys, pl.cdiv((block + 1) * sizes.queries, sizes.keys)
        d_q = jax.lax.fori_loop(*blocks, one, jnp.zeros(q.shape, jnp.float32))
        out_ref[...] = (d_q * scale).astype(q.dtype)

    specs = _Specs(q, k, sizes)
    return called(
        document_queries,
        grid=specs.by_queries,
        warps=sizes.warps,
        stages=sizes.stages,
        in_specs=[
            *(specs.queries, specs.row, specs.row, specs.queries, specs.queries),
            *(specs.sums, specs.of_queries),
        ],
        out_specs=[specs.queries, specs.sums],
        out_shape=[_like(q), specs.sums_shape],
        interpret=interpret,
    )(q, k, v, mixed, d, sums, begin)


def _of_keys(
    q: Array,
    k: Array,
    v: Array,
    d: Array,
    sums: Array,
    inner: Array,
    begin: Array,
    end: Array,
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """Gradients by keys and values, of all heads of queries that share them."""
    from jax.experimental import pallas as pl

    sizes = OF_KEYS
    group = q.shape[2] // k.shape[2]

    def document_keys(
        k_ref, v_ref, q_ref, d_ref, sums_ref, inner_ref, begin_ref, end_ref, d_k_ref, d_v_ref
    ):
        k, v, block = k_ref[...], v_ref[...], pl.program_id(2)

        def of_head(head, carry):
            def one(number, carry):
                d_k, d_v = carry
                here = pl.ds(number * sizes.queries, sizes.queries)
                q, d = q_ref[here, head, :], d_ref[here, head, :]
                query = number * sizes.queries + jnp.arange(sizes.queries)
                seen = _seen(query[None], begin_ref[here][None], block, sizes.keys)
                logits = dot(k, q, over=(1, 1)) * (scale * math.log2(math.e))
                sums, inner = sums_ref[head, here], inner_ref[head, here]
                shares = jnp.where(seen, jnp.exp2(logits - sums[None, :]), 0)
                d_v = d_v + dot(shares.astype(d.dtype), d)
                d_logits = shares * (dot(v, d, over=(1, 1)) - inner[None, :])
                return d_k + dot(d_logits.astype(q.dtype), q), d_v

            last = end_ref[sizes.keys - 1] // sizes.queries
            blocks = block * sizes.keys // sizes.queries, last + 1
            return jax.lax.fori_loop(*blocks, one, carry)

        zeros = jnp.zeros(k.shape, jnp.float32)
        d_k, d_v = jax.lax.fori_loop(0, group, of_head, (zeros, zeros))
        d_k_ref[...] = (d_k * scale).astype(k.dtype)
        d_v_ref[...] = d_v.astype(v.dtype)

    specs = _Specs(q, k, sizes)
    return called(
        document_keys,
        grid=specs.by_keys,
        warps=sizes.warps,
        stages=sizes.stages,
        in_specs=[
            *(specs.keys, specs.keys, specs.heads, specs.heads),
            *(specs.all_sums, specs.all_sums, specs.all_of_row, specs.of_keys),
        ],
        out_specs=[specs.keys, specs.keys],
        out_shape=[_like(k), _like(v)],
        interpret=interpret,
    )(k, v, q, d, sums, inner, begin, end)


def _seen(query: Array, first: Array, number: Any, size: int) -> Array:
    """Mask of the keys of a block that queries see, from the first of their documents."""
    key = jnp.expand_dims(number * size + jnp.arange(size), query.shape.index(1) ^ 1)
    return (key <= query) & (key >= first)


class _Specs:
    """What a program of a kernel has of each array, by row, head and block."""

    def __init__(self, q: Array, k: Array, sizes: Block):
        from jax.experimental import pallas as pl

        batch, length, heads, dim = q.shape
        kv_heads = k.shape[2]
        group = heads // kv_heads
        self.by_queries = batch, heads, length // sizes.queries
        self.by_keys = batch, kv_heads, length // sizes.keys
        self.sums_shape = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        # By blocks of queries, each of a head.
        self.queries = pl.BlockSpec((None, sizes.queries, None, dim), lambda b, h, i: (b, i, h, 0))
        self.row = pl.BlockSpec((None, length, None, dim), lambda b, h, i: (b, 0, h // group, 0))
        self.of_queries = pl.BlockSpec((None, sizes.queries), lambda b, h, i: (b, i))
        self.sums = pl.BlockSpec((None, None, sizes.queries), lambda b, h, i: (b, h, i))
        # By blocks of keys, each of a head of theirs and of all heads of queries that it has.
        self.keys = pl.BlockSpec((None, sizes.keys, None, dim), lambda b, h, i: (b, i, h, 0))
        self.heads = pl.BlockSpec((None, length, group, dim), lambda b, h, i: (b, 0, h, 0))
        self.of_keys = pl.BlockSpec((None, sizes.keys), lambda b, h, i: (b, i))
        self.all_of_row = pl.BlockSpec((None, length), lambda b, h, i: (b, 0))
        self.all_sums = pl.BlockSpec((None, group, length), lambda b, h, i: (b, h, 0))


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
