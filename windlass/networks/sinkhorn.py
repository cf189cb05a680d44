"""Sinkhorn's normalization of a small matrix for every token, in one kernel where a device has one.

In plain XLA each iteration is a launch or more for little work; unrolled, a compiler takes minutes
for the gradient. In a kernel all iterations over a block of tokens happen in registers.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from windlass import doubly_stochastic
from windlass.devices.axes import device, is_nvidia, layout
from windlass.doubly_stochastic import Matrix

LANES = 128  # tokens side by side, the width of a TPU's registers
ROWS = {"tpu": 8, "gpu": 1}  # of them in a block: a TPU's registers, or a token for each thread
WARPS = 4  # of 32 threads

Entries = Float[Array, "entries batch seq"]  # of matrices, row by row


def sinkhorn(logits: Entries, iterations: int) -> Matrix:
    """`doubly_stochastic.sinkhorn` of a matrix for every token, each device those that it has."""
    platform, n = _platform(), math.isqrt(len(logits))
    if platform is None:
        return doubly_stochastic.sinkhorn(_matrix(logits, n), iterations)
    places = layout(". batch seq", logits.shape)
    local = jax.shard_map(
        lambda logits: in_kernel(logits, n, iterations, platform),
        in_specs=places,
        out_specs=places,
        check_vma=False,  # the checker does not see into kernels
    )
    return _matrix(local(logits), n)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def in_kernel(
    logits: Entries, n: int, iterations: int, platform: str, interpret: bool = False
) -> Entries:
    """Sinkhorn's normalization of n × n matrices by a kernel for a platform, on one device."""

    def kernel(logits, out):
        _write(out, doubly_stochastic.sinkhorn_values(_matrix(logits, n), iterations))

    return _called(kernel, [logits], [n * n], platform, interpret)[0]


def _forward(logits, *how):
    return in_kernel(logits, *how), logits


def _backward(n: int, iterations: int, platform: str, interpret: bool, logits, gradient):
    def kernel(logits, gradient, out, history):
        found = doubly_stochastic.sinkhorn_gradient(
            iterations, _matrix(logits, n), _matrix(gradient, n), partial(_scan, history, n)
        )
        _write(out, found)

    sizes = [n * n, iterations * n]
    return (_called(kernel, [logits, gradient], sizes, platform, interpret)[0],)


in_kernel.defvjp(_forward, _backward)


def _scan(history, n: int, step, start, steps, *, length: int, reverse: bool = False):
    """A scan in a kernel, over vectors of n that it keeps in `history` or reads from there."""

    def one(i, now):
        first = (length - 1 - i if reverse else i) * n
        given = None if steps is None else tuple(steps[first + k] for k in range(n))
        now, kept = step(now, given)
        for k, lane in enumerate(kept or ()):
            history[first + k] = lane
        return now

    return jax.lax.fori_loop(0, length, one, start), history


def _called(kernel, inputs: list[Entries], sizes: list[int], platform: str, interpret: bool):
    """A kernel's outputs of so many entries for every token, from inputs of as many tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, rows = inputs[0].shape[1:], ROWS[platform]
    count = tokens[0] * tokens[1]
    blocks = -(-count // (rows * LANES))
    filled = (0, blocks * rows * LANES - count)
    blocked = [
        jnp.pad(x.reshape(-1, count), ((0, 0), filled)).reshape(-1, blocks * rows, LANES)
        for x in inputs
    ]
    block = lambda size: pl.BlockSpec((size, rows, LANES), lambda i: (0, i, 0))  # noqa: E731
    params: Any = triton.CompilerParams(num_warps=WARPS, num_stages=1)
    outputs = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[block(len(x)) for x in blocked],
        out_specs=[block(size) for size in sizes],
        out_shape=[jax.ShapeDtypeStruct((n, blocks * rows, LANES), jnp.float32) for n in sizes],
        compiler_params=params if platform == "gpu" else None,
        interpret=interpret,
    )(*blocked)
    return [x.reshape(len(x), -1)[:, :count].reshape(-1, *tokens) for x in outputs]


def _platform() -> str | None:
    """Platform of the mesh's devices, if there is a kernel for it, or else None."""
    here = device()
    if is_nvidia(here.platform, here.device_kind):
        return "gpu"
    return "tpu" if here.platform == "tpu" else None


def _matrix(entries: Any, n: int) -> Matrix:
    return tuple(tuple(entries[i * n + j] for j in range(n)) for i in range(n))


def _write(out: Any, matrix: Matrix) -> None:
    for i, lane in enumerate(lane for row in matrix for lane in row):
        out[i] = lane
