"""Kernels in Triton, for an NVIDIA GPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def called(kernel: Callable, *, warps: int = 4, stages: int = 2, **how: Any) -> Callable:
    """A kernel in Triton."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    params: Any = triton.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=params, name=kernel.__name__, **how)


def dot(a: Array, b: Array, *, over: tuple[int, int] = (1, 0)) -> Array:
    """A matmul in a kernel, over an axis of each, in float32."""
    axes = ((over[:1], over[1:]), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def sigmoid(x: Array, *, interpret: bool) -> Array:
    """The logistic function of float32 numbers in a kernel, but for its last bit.

    A division takes more instructions than all else that SwiGLU computes; the reciprocal is one.
    """
    from jax.experimental.pallas import triton

    below = 1 + jnp.exp(-x)
    if interpret:
        return 1 / below
    (found,) = triton.elementwise_inline_asm(
        "rcp.approx.ftz.f32 $0, $1;",
        args=[below],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found
