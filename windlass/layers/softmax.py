"""Statistics of logits that a loss needs: log Σ exp z, the target's logit and the highest.

In plain XLA each of them is a pass over a tile of logits on a GPU, and their gradient one more at
two thirds of the memory's speed. Kernels read a tile once for all three, and write the gradient
over it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from windlass.devices.axes import layout, split_over, tensor_ways
from windlass.devices.sketch import on_gpu
from windlass.devices.triton import called

WARPS = 4  # of 32 threads, that have a token
LANES = 8 * 32 * WARPS  # logits that they look at together: 16 bytes a thread
TOGETHER = 8  # parts of a token's logits, that are looked at in an iteration


class Statistics(NamedTuple):
    """Of each token's logits."""

    log_z: Float[Array, "..."]  # log Σ exp z over the vocabulary
    target: Float[Array, "..."]  # the target's logit
    highest: Float[Array, "..."]


def statistics(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], dtype: Any
) -> Statistics:
    """Statistics of float32 logits that a matmul has given in `dtype`.

    Through `highest` there is no gradient.
    """
    if not _has_kernel(logits, dtype):
        highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        return Statistics(log_z(logits), pick(logits, targets), highest)
    rows = layout(("batch",), logits.shape[:1])
    if rows is None:  # no mesh
        return in_kernel(logits, targets)
    tokens = PartitionSpec(*rows, *[None] * (targets.ndim - 1))
    specs = PartitionSpec(*tokens, split_over("vocab", logits.shape[-1])), tokens
    local = jax.shard_map(
        in_kernel,
        in_specs=specs,
        out_specs=tokens,
        check_vma=False,  # the checker does not see into kernels
    )
    return local(*map(jax.sharding.reshard, (logits, targets), specs))


def log_z(logits: Float[Array, "... vocab"]) -> Float[Array, "..."]:
    """The log-partition function, log Σ exp z over the vocabulary."""
    return jax.nn.logsumexp(logits, axis=-1)


def pick(logits: Float[Array, "... vocab"], targets: Int[Array, "..."]) -> Float[Array, "..."]:
    """The target logit of each token.

    By comparison: an indexed read would scatter into a whole tile in the backward pass, and cannot
    cross the devices that share the vocabulary.
    """
    hot = targets[..., None] == jnp.arange(logits.shape[-1])
    return jnp.sum(jnp.where(hot, logits, 0.0), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_kernel(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], interpret: bool = False
) -> Statistics:
    """Statistics of logits that are bfloat16 numbers, by a kernel, on one device."""
    return _read(_stored(logits), targets, interpret)


def _forward(logits, targets, interpret: bool):
    stored = _stored(logits)
    found = _read(stored, targets, interpret)
    return found, (stored, targets, found.log_z)


def _backward(interpret: bool, kept, gradient: Statistics):
    logits, targets, z = kept
    return _written(logits, targets, z, gradient, interpret).astype(jnp.float32), None


in_kernel.defvjp(_forward, _backward)


def _stored(logits: Array) -> Array:
    """The array that the matmul wrote: XLA drops both conversions."""
    return logits.astype(jnp.bfloat16)


def _read(logits: Array, targets: Array, interpret: bool) -> Statistics:
    vocab = logits.shape[-1]

    def softmax(logits, targets, log_z, target, highest):
        def joined(now, values):
            # A maximum and a sum in every lane: lanes are joined once, at the end.
            most, total = now
            new = functools.reduce(jnp.maximum, values, most)
            total = total * jnp.exp(most - new)
            return new, functools.reduce(lambda total, x: total + jnp.exp(x - new), values, total)

        def several(i, now):
            return joined(now, [_loaded(logits, TOGETHER * i + j) for j in range(TOGETHER)])

        def last(i, now):
            return joined(now, [_Columns(i, vocab).load(logits, other=-jnp.inf)])

        now = jnp.full(LANES, jnp.finfo(jnp.float32).min), jnp.zeros(LANES, jnp.float32)
        rounds = vocab // (LANES * TOGETHER)
        now = jax.lax.fori_loop(0, rounds, several, now)
        mosts, totals = jax.lax.fori_loop(rounds * TOGETHER, _parts(vocab), last, now)
        most = jnp.max(mosts)
        total = jnp.sum(totals * jnp.exp(mosts - most))
        own = targets[0]
        found = logits[jnp.clip(own, 0, vocab - 1)].astype(jnp.float32)
        is_there = (own >= 0) & (own < vocab)
        log_z[0], highest[0] = most + jnp.log(total), most
        target[0] = jnp.where(is_there, found, 0.0)

    shape = jax.ShapeDtypeStruct((targets.size,), jnp.float32)
    inputs = [logits.reshape(-1, vocab), targets.reshape(-1)]
    found = _called(softmax, inputs, [shape] * 3, interpret)
    return Statistics(*(x.reshape(targets.shape) for x in found))


def _written(logits: Array, targets: Array, z: Array, gradient: Statistics, interpret: bool):
    """softmax(z) of each token times the gradient of its log Z, and that of its target's logit."""
    vocab = logits.shape[-1]

    def softmax_gradient(logits, targets, z, d_z, d_target, out):
        own, z, d_z, d_target = targets[0], z[0], d_z[0], d_target[0]

        def one(i, _):
            part = _Columns(i, vocab)
            own_gradient = jnp.where(part.at == own, d_target, 0.0)
            part.store(out, jnp.exp(part.load(logits) - z) * d_z + own_gradient)

        jax.lax.fori_loop(0, _parts(vocab), one, None)

    flat = logits.reshape(-1, vocab)
    of_tokens = [x.reshape(-1) for x in (targets, z, gradient.log_z, gradient.target)]
    shape = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    in_place = {"input_output_aliases": {0: 0}}
    (out,) = _called(softmax_gradient, [flat, *of_tokens], [shape], interpret, **in_place)
    return out.reshape(logits.shape)


def _has_kernel(logits: Array, dtype: Any) -> bool:
    is_whole = tensor_ways() == 1 and logits.size < 2**31
    return on_gpu() and is_whole and dtype == jnp.bfloat16


def _called(
    kernel: Callable, inputs: Sequence[Array], outputs: Sequence[Any], interpret: bool, **how: Any
) -> Sequence[Array]:
    """Outputs of a kernel with a program for every row of the inputs, all of one or two axes."""
    from jax.experimental import pallas as pl

    def row(x) -> pl.BlockSpec:
        if len(x.shape) == 1:
            return pl.BlockSpec((1,), lambda i: (i,))
        return pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0))

    return called(
        kernel,
        grid=(len(inputs[0]),),
        in_specs=[row(x) for x in inputs],
        out_specs=[row(x) for x in outputs],
        out_shape=list(outputs),
        warps=WARPS,
        stages=1,
        interpret=interpret,
        **how,
    )(*inputs)


class _Columns:
    """_Columns of rows that are looked at together: the i-th `LANES` of them, less at the end."""

    def __init__(self, i: Array | int, columns: int):
        self.start = i * LANES
        self.at = self.start + jnp.arange(LANES)
        self.mask = self.at < columns

    def load(self, row: Any, *, first: int = 0, other: float = 0.0) -> Array:
        """Its numbers in float32, of columns counted from `first`, and `other` past the end."""
        from jax.experimental.pallas import triton

        found = triton.load(self._place(row, first), mask=self.mask, other=other)
        return found.astype(jnp.float32)

    def store(self, row: Any, values: Array, *, first: int = 0) -> None:
        from jax.experimental.pallas import triton

        triton.store(self._place(row, first), values.astype(row.dtype), mask=self.mask)

    def _place(self, row: Any, first: int) -> Any:
        return row.at[jax.ds(first + self.start, LANES)]


def _loaded(row: Any, i: Array | int) -> Array:
    """The i-th `LANES` numbers of a row, all of which are there, in float32."""
    from jax.experimental.pallas import triton

    return triton.load(row.at[jax.ds(i * LANES, LANES)]).astype(jnp.float32)


def _parts(columns: int) -> int:
    """Number of parts of so many columns."""
    return -(-columns // LANES)
