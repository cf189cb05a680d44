"""Splash attention, JAX's Pallas kernel for TPUs, on packed rows.

Imported where it is used: it takes half a second.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array

from windlass.layers.pattern import Pattern

LANES = 128  # the width of a TPU's registers: lengths are padded to a multiple of it
LARGEST_BLOCK = 512  # positions that the kernel takes at a time
FILLED = -3  # the document of what fills a row up: no real one, padding (-1) or empty slot (-2)


class CellMask(masks.Mask):
    """Mask of cells of `pattern.stride` positions: those that a query sees, computed in the kernel.

    By `mask_function`, exactly, from where each query stands, which is known when it runs; by
    index, for the blocks that are left out of the program, wherever a phase may have put a cell.
    """

    def __init__(self, shape: tuple[int, int], pattern: Pattern):
        self._shape, self.stride = shape, pattern.stride
        self.left, self.right = pattern.sides
        self.q_sequence = np.arange(shape[0], dtype=np.int32)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, index) -> np.ndarray:
        queries, slots = (np.arange(n)[part] for n, part in zip(self._shape, index, strict=True))
        return np.asarray(self._seen(queries[:, None] - self.stride * slots, self.stride - 1))

    def mask_function(self, at: Any, slots: Any) -> Any:
        return self._seen(at - self.stride * slots, 0)

    def _seen(self, back: Any, slack: int) -> Any:
        seen = back == back
        if self.left is not None:
            seen &= back <= self.left + slack
        if self.right is not None:
            seen &= back >= -self.right
        return seen


def attend(
    q: Array,
    k: Array,
    v: Array,
    document: Array,
    slots: Array,
    at: Any,
    *,
    pattern: Pattern,
    scale: float,
    saved_as: str,
    interpret: bool,
) -> Array:
    """Attention as in `kernels.attend`; what the backward pass needs has the name `saved_as`."""
    length, heads = q.shape[1:3]
    # What fills a row up is a document of its own, and what it sees is cut off.
    q, k, v = (_filled(x, 0) for x in (q, k, v))
    document, slots = (_filled(x, FILLED) for x in (document, slots))
    kernel = _kernel((q.shape[1], k.shape[1]), heads, pattern, saved_as, interpret)
    # The kernel multiplies nothing, and wants heads before positions.
    q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
    segments = kernels.SegmentIds(document, slots)
    if pattern.stride == 1:
        mixed: Any = jax.vmap(kernel)(q, k, v, segments)
    else:
        placed = jax.vmap(lambda at, *arrays: _at(kernel, at)(*arrays))
        mixed = placed(_filled(at, 0), q, k, v, segments)
    return mixed.swapaxes(1, 2)[:, :length].astype(v.dtype)


def _kernel(shape: tuple[int, int], heads: int, pattern: Pattern, saved_as: str, interpret: bool):
    mask = _mask(shape, pattern)
    queries, slots = (_block(length) for length in shape)
    return kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=queries,
            block_kv=slots,
            block_q_dkv=queries,
            block_kv_dkv=slots,
            block_q_dq=queries,
            block_kv_dq=slots,
        ),
        residual_checkpoint_name=saved_as,
        interpret=interpret,
    )


def _mask(shape: tuple[int, int], pattern: Pattern) -> masks.Mask:
    if pattern.stride > 1:
        return CellMask(shape, pattern)
    if pattern.sides == (None, None):
        return masks.FullMask(shape)
    return masks.LocalMask(shape, pattern.sides, 0)


def _at(kernel: kernels.SplashAttentionKernel, at: Array) -> kernels.SplashAttentionKernel:
    """The kernel for queries that stand at these positions of their row."""
    parts = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    moved: list[Any] = [None if part is None else part._replace(q_sequence=at) for part in parts]
    return kernels.SplashAttentionKernel(*moved, **kernel.kwargs)


def _block(length: int) -> int:
    return next(size for size in range(LARGEST_BLOCK, 0, -LANES) if length % size == 0)


def _filled(x: Array, value: int) -> Array:
    missing = -x.shape[1] % LANES
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), constant_values=value)
