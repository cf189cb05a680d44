"""One number for all tokens that a run has consumed, in their order."""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from windlass.checkpoint.fingerprint import fingerprints


def none() -> UInt32[Array, ""]:
    """The hash of nothing."""
    return jnp.uint32(0)


def with_batch(stream: UInt32[Array, ""], tokens: Int[Array, "batch seq"]) -> UInt32[Array, ""]:
    """The hash once the tokens of one more batch are in it.

    It depends on the rows and their order alone, and not on where they live: any mesh, any number
    of microbatches and any number of processes give the same one.
    """
    batch = fingerprints({"tokens": tokens})["tokens"]
    # One to one in what was before for a given batch, so that no later batch hides a difference.
    mixed = (stream * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15)) ^ batch
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    return mixed ^ (mixed >> 13)
