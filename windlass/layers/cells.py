"""Cells of multiscale attention: one per stride of a document, counted from its beginning.

Position p of a document is the newest input of a cell where p + 1 is a multiple of the stride s.
Such positions of a row are at least s apart, whatever documents begin between them, so that there
is at most one among the positions j s .. (j + 1) s - 1 of a row: that cell is in slot j.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from windlass.layers import recurrence

EMPTY = -2  # the document of a slot that holds nothing; -1 is padding


class Cells:
    """The cells that end in some positions of rows, the first of them being position `first`."""

    def __init__(
        self,
        position: Int[Array, "batch seq"],
        document: Int[Array, "batch seq"],
        stride: int,
        first: int | Int[Array, ""] = 0,
    ):
        length = position.shape[1]
        self.stride, self.slot, self._offset = stride, first // stride, first % stride
        self._count = slots_of(length, stride, is_aligned=isinstance(first, int))
        is_end = ((position + 1) % stride == 0) & (document >= 0)
        self._is_end = self._framed(is_end)
        own = jnp.where(self._is_end, self._framed(document), EMPTY)
        self.documents = jnp.max(own, axis=2)  # of the cell in each slot
        self.phase = (first + jnp.arange(length, dtype=jnp.int32) - position - 1) % stride

    def take(self, x: Array) -> Array:
        """`x` at the newest input of each cell, [batch, slots, ...]; zeros where there is none."""
        is_end = self._is_end.reshape(self._is_end.shape + (1,) * (x.ndim - 2))
        return jnp.sum(jnp.where(is_end, self._framed(x), jnp.zeros((), x.dtype)), axis=2)

    def _framed(self, x: Array) -> Array:
        """Positions by slot, [batch, slots, stride, ...]."""
        missing = self._count * self.stride - x.shape[1]
        padded = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
        if not isinstance(self._offset, int):
            padded = jnp.roll(padded, self._offset, axis=1)
        shape, spec = (x.shape[0], self._count, self.stride, *x.shape[2:]), recurrence.spec(x)
        # With one row and one slot, as in decode of a single prompt, two axes are of 1, and JAX
        # takes the batch axis of the layout for neither.
        framed = None if spec is None else PartitionSpec(spec[0], None, *spec[1:])
        return jnp.reshape(padded, shape, out_sharding=framed)


def slots_of(length: int, stride: int, *, is_aligned: bool) -> int:
    """Slots that `length` positions may reach into, beginning with a slot or anywhere in one."""
    return -(-length // stride) if is_aligned else (length + stride - 2) // stride + 1
