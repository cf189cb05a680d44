"""Kernels in Triton, for an NVIDIA GPU."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    below = 1 + jnp.exp(-x)
    return 1 / below if interpret else _assembled("rcp.approx.ftz.f32 $0, $1;", below)


def shares(x: Array, scale: float, less: Array, *, interpret: bool) -> Array:
    """2 ** (scale * x - less) of float32 numbers in a kernel, but for its last bits.

    A multiply-add and a power: what is compiled of the formula multiplies, subtracts, and handles
    numbers below the least normal one, which takes more instructions than a softmax's other parts.
    """
    less = jnp.broadcast_to(less, x.shape)
    if interpret:
        return jnp.exp2(scale * x - less)
    factor = f"0f{np.float32(scale).view(np.uint32):08X}"
    powers = f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, {factor}, $2; ex2.approx.ftz.f32 $0, t; }}"
    return _assembled(powers, x, -less)


def _assembled(instructions: str, *inputs: Array) -> Array:
    """Float32 numbers by instructions of PTX, one by one."""
    from jax.experimental.pallas import triton

    (found,) = triton.elementwise_inline_asm(
        instructions,
        args=inputs,
        constraints=",".join(["=f", *("f" for _ in inputs)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32)],
    )
    return found
