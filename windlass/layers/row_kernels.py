"""Triton kernels for NVIDIA GPUs in which a program has a row of every array: its token."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from windlass.devices.axes import device, is_nvidia
from windlass.devices.sketch import is_sketched

WARPS = 8  # of 32 threads, that have a row
LANES = 8 * 32 * WARPS  # numbers that they look at together: 16 bytes a thread


def on_gpu() -> bool:
    """Return True if what is traced here is to run on NVIDIA GPUs."""
    here = device()
    return is_nvidia(here.platform, here.device_kind) and not is_sketched()


def on_one_gpu() -> bool:
    """Return True if what is traced here is to run on an NVIDIA GPU alone."""
    return on_gpu() and jax.sharding.get_abstract_mesh().size == 1


def called(
    kernel: Callable, inputs: Sequence[Array], outputs: Sequence[Any], interpret: bool, **how: Any
) -> Sequence[Array]:
    """Outputs of a kernel with a program for every row of the inputs, all of one or two axes."""
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
        out_specs=[row(x) for x in outputs],
        out_shape=list(outputs),
        compiler_params=params,
        interpret=interpret,
        name=kernel.__name__,
        **how,
    )(*inputs)


class Columns:
    """Columns of rows that are looked at together: the i-th `LANES` of them, less at the end."""

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


def parts(columns: int) -> int:
    """Number of parts of so many columns."""
    return -(-columns // LANES)
