"""The token hash: one number for all that a run has consumed, in its order."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from windlass.checkpoint.fingerprint import fingerprints


def none() -> UInt32[Array, ""]:
    """The hash of nothing."""
    return jnp.uint32(0)


def with_batch(
    so_far: UInt32[Array, ""], batch: Mapping[str, Array], hashed: Sequence[str]
) -> UInt32[Array, ""]:
    """The hash once these columns of one more batch are in it, one behind the other.

    It depends on the rows and their order alone, and not on where they live: any mesh, any number
    of microbatches and any number of processes give the same one.
    """
    for column in fingerprints([batch[name] for name in hashed]).values():
        # One to one in what was before for a given batch, so that no later one hides a difference.
        mixed = (so_far * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15)) ^ column
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
        so_far = mixed ^ (mixed >> 13)
    return so_far
