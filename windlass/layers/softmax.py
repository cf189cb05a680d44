"""Statistics of logits that a loss needs: log Σ exp z, the target's logit and the highest.

In plain XLA each of them is a pass over a tile of logits on a GPU, and their gradient one more at
two thirds of the memory's speed. Kernels read a tile once for all three, and write the gradient
over it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from windlass.devices.axes import device, is_nvidia, layout, split_over, tensor_ways
from windlass.layers.sketch import is_sketched

WARPS = 8  # of 32 threads, that look at a token's logits
LANES = 8 * 32 * WARPS  # logits that they look at together: 16 bytes a thread
PARTS = 4  # of so many logits, that an iteration looks at


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
    from jax.experimental.pallas import triton

    vocab = logits.shape[-1]

    def softmax(logits, targets, log_z, target, highest):
        own = targets[0]

        def part(i, now):
            # A maximum and a sum in every lane: lanes are joined once, at the end.
            most, total, found = now
            parts = [
                _part(triton, logits, PARTS * i + j, vocab, other=-jnp.inf) for j in range(PARTS)
            ]
            new = functools.reduce(jnp.maximum, [x for x, _ in parts], most)
            total = total * jnp.exp(most - new)
            for x, at in parts:
                total += jnp.exp(x - new)
                found += jnp.where(at == own, x, 0.0)
            return new, total, found

        low = jnp.full(LANES, jnp.finfo(jnp.float32).min)
        none = jnp.zeros(LANES, jnp.float32)
        lanes = jax.lax.fori_loop(0, -(-vocab // (PARTS * LANES)), part, (low, none, none))
        most = jnp.max(lanes[0])
        total = jnp.sum(lanes[1] * jnp.exp(lanes[0] - most))
        log_z[0], target[0], highest[0] = most + jnp.log(total), jnp.sum(lanes[2]), most

    shape = jax.ShapeDtypeStruct((targets.size,), jnp.float32)
    inputs = [logits.reshape(-1, vocab), targets.reshape(-1)]
    found = _called(softmax, inputs, [shape] * 3, interpret)
    return Statistics(*(x.reshape(targets.shape) for x in found))


def _written(logits: Array, targets: Array, z: Array, gradient: Statistics, interpret: bool):
    """softmax(z) of each token times the gradient of its log Z, and that of its target's logit."""
    from jax.experimental.pallas import triton

    vocab = logits.shape[-1]

    def softmax_gradient(logits, targets, z, d_z, d_target, out):
        own, z, d_z, d_target = targets[0], z[0], d_z[0], d_target[0]

        def part(i, _):
            x, at = _part(triton, logits, i, vocab, other=0.0)
            d = jnp.exp(x - z) * d_z + jnp.where(at == own, d_target, 0.0)
            triton.store(_place(out, i), d.astype(out.dtype), mask=at < vocab)

        jax.lax.fori_loop(0, -(-vocab // LANES), part, None)

    flat = logits.reshape(-1, vocab)
    of_tokens = [x.reshape(-1) for x in (targets, z, gradient.log_z, gradient.target)]
    shape = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    in_place = {"input_output_aliases": {0: 0}}
    (out,) = _called(softmax_gradient, [flat, *of_tokens], [shape], interpret, **in_place)
    return out.reshape(logits.shape)


def _part(triton, logits, i: Array, vocab: int, *, other: float) -> tuple[Array, Array]:
    """A part of a token's logits in float32, with `other` beyond the last, and their ids."""
    at = i * LANES + jnp.arange(LANES)
    x = triton.load(_place(logits, i), mask=at < vocab, other=other)
    return x.astype(jnp.float32), at


def _place(array, i: Array):
    return array.at[jax.ds(i * LANES, LANES)]


def _called(kernel, inputs: list, shapes: list, interpret: bool, **how: Any):
    """Outputs of a kernel with a program for every token, which has a row of all arrays."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def row(x) -> pl.BlockSpec:
        if len(x.shape) == 1:
            return pl.BlockSpec((1,), lambda i: (i,))
        return pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0))

    params: Any = triton.CompilerParams(num_warps=WARPS, num_stages=1)
    return pl.pallas_call(
        kernel,
        grid=(len(inputs[0]),),
        in_specs=[row(x) for x in inputs],
        out_specs=[row(x) for x in shapes],
        out_shape=shapes,
        compiler_params=params,
        interpret=interpret,
        name=kernel.__name__,
        **how,
    )(*inputs)


def _has_kernel(logits: Array, dtype: Any) -> bool:
    here = device()
    is_whole = tensor_ways() == 1 and logits.size < 2**31
    on_gpu = is_nvidia(here.platform, here.device_kind) and not is_sketched()
    return on_gpu and is_whole and dtype == jnp.bfloat16
