"""Groups of inputs: a matrix as blocks of consecutive entries of the axes that it reads.

In a Hugging Face checkpoint a matrix is [outputs, inputs], several axes that are read as one, and a
group lies within a row. Here it is [reads..., writes...], and becomes [groups, size, writes...].
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from windlass.devices.axes import stored


def grouped(
    weight: Float[Array, "..."], reads: Sequence[str], writes: Sequence[str], size: int
) -> Float[Array, "groups size ..."]:
    """The blocks of a matrix, as it is sharded, but that no group is cut."""
    inputs, outputs = math.prod(weight.shape[: len(reads)]), weight.shape[len(reads) :]
    shape = (inputs // size, size, *outputs)
    return jnp.reshape(weight, shape, out_sharding=stored((reads[0], "", *writes), shape))


def ungrouped(
    blocks: Float[Array, "groups size ..."],
    reads: Sequence[str],
    writes: Sequence[str],
    shape: Sequence[int],
) -> Float[Array, "..."]:
    """The matrix of blocks, of this shape."""
    place = stored((*reads, *writes), shape)
    return jnp.reshape(blocks, tuple(shape), out_sharding=place)


def scale_axes(reads: Sequence[str], writes: Sequence[str]) -> tuple[str, ...]:
    """Axes of scales [groups, writes...]: groups are sharded as what they are groups of."""
    return (reads[0], *writes)
