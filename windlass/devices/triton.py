"""Kernels in Triton, for an NVIDIA GPU."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import Array, PyTree

from windlass.devices.sketch import is_sketched

SKETCHED = Primitive("sketched_kernel")  # in the place of a kernel, in programs that never run
SKETCHED.multiple_results = True


def called(
    kernel: Callable,
    *,
    warps: int = 4,
    stages: int = 2,
    matmul: tuple[int, int, int] | None = None,
    **how: Any,
) -> Callable:
    """A kernel in Triton.

    `matmul` are rows, columns and depth of the product it computes, where that takes longer than
    to read and write.
    """
    if is_sketched():
        return _sketched(kernel.__name__, matmul, **how)
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
    from jaxlib.triton import dialect

    # MLIR imports this for each operation that it makes, and finds nothing in any folder.
    sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)
    params: Any = triton.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=params, name=kernel.__name__, **how)


def _sketched(
    name: str,
    matmul: tuple[int, int, int] | None,
    *,
    out_shape: PyTree,
    input_output_aliases: dict[int, int] | None = None,
    **_: Any,
) -> Callable:
    """A kernel by its inputs and outputs: what it computes takes long to trace."""
    leaves, structure = jax.tree.flatten(out_shape)
    aliases = tuple((input_output_aliases or {}).items())

    def call(*inputs: Array) -> PyTree:
        how = dict(name=name, results=tuple(leaves), aliases=aliases, matmul=matmul)
        return structure.unflatten(SKETCHED.bind(*inputs, **how))

    return call


@SKETCHED.def_abstract_eval
def _types(*_: Any, results: Sequence[jax.ShapeDtypeStruct], **__: Any) -> list[Any]:
    return [jax.typeof(one) for one in results]


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
