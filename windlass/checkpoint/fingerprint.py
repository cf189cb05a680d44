"""Fingerprints of arrays: 32-bit hashes that change with any bit, and not with the sharding."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped, UInt32


def named(tree: PyTree) -> dict[str, Any]:
    """The leaves of a pytree under their key paths, `moments.0.mu.blocks.weight`."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in arrays:
            raise ValueError(f"two arrays of the tree are both named {name}")
        if not hasattr(leaf, "dtype") or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"{name} is {leaf!r}; only arrays of numbers are stored, keys as data")
        arrays[name] = leaf
    return arrays


def fingerprints(tree: PyTree) -> dict[str, UInt32[Array, ""]]:
    """The fingerprint of every leaf of a pytree, by key path; it can be called inside `jit`.

    Each element's bits and index are mixed to 32 bits, one to one for a given index, and summed
    modulo 2^32. So a change of one element always shows, a permutation does but for a chance of
    2^-32, and the order of summation, hence the layout on a mesh, does not matter.
    """
    return {name: _fingerprint(array) for name, array in named(tree).items()}


def measure(tree: PyTree) -> dict[str, int]:
    """The fingerprints of a tree as plain numbers.

    Compiled once for each kind of array: a tree has far fewer kinds than arrays, and moments are
    of the same kinds as weights.
    """
    # One after the other: on simulated devices, programs that wait for each other's devices in
    # different orders may wait for ever.
    return {name: int(_compiled(array)) for name, array in named(tree).items()}


def _fingerprint(array: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    bits = as_words(array)
    # The index counts modulo 2^32, in row-major order, from one iota per axis: a flat iota would
    # need a reshape, and with it the whole array on every device.
    layout = jax.typeof(bits).sharding
    index = jnp.zeros((), jnp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        position = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis, out_sharding=layout)
        index = index + position * jnp.uint32(stride)
    # Distinct odd multipliers and the finaliser of MurmurHash3, which is a bijection of 32 bits.
    mixed = bits ^ (index * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


_compiled = jax.jit(_fingerprint)


def as_words(array: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
    """The same bits as 32-bit words; an element wider than that gets a last axis of words."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint32)
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    width = (jnp.iinfo if is_integer else jnp.finfo)(array.dtype).bits
    if width < 8:  # too narrow for a bitcast, and exact in a wider type
        array, width = array.astype(jnp.int32 if is_integer else jnp.float32), 32
    words = {8: jnp.uint8, 16: jnp.uint16}.get(width, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, words).astype(jnp.uint32)
