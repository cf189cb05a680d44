"""Dropout: random zeros in training, and none elsewhere."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from windlass.devices.axes import layout

Model = TypeVar("Model")


class Dropout(eqx.Module):
    """Dropout: a share of the inputs becomes zero, and the rest larger to make up for it.

    Without a key, as in evaluation, everything goes through as it is.
    """

    rate: float = eqx.field(static=True)
    stack: tuple[int, ...] = eqx.field(static=True)  # the lengths of the axes it is stacked along
    key: UInt32[Array, "..."] | None = None  # set by `keyed` for one call of the model

    def __call__(self, x: Float[Array, "..."], axes: Sequence[str]) -> Float[Array, "..."]:
        if self.key is None:
            return x
        keep = 1 - self.rate
        is_kept = random_bits(self.key, axes, x.shape) < np.uint32(keep * 2**32)
        return jnp.where(is_kept, x / keep, jnp.zeros_like(x))


def random_bits(
    key: UInt32[Array, "2"], axes: Sequence[str], shape: Sequence[int]
) -> UInt32[Array, "..."]:
    """32 random bits for each place, hashed from the key's two words and the place's indices.

    Enough for dropout at a tenth of the operations of threefry, which compilers for TPUs inline
    into every matmul that reads the mask, and then need minutes. The same on any mesh.
    """
    bits = key[0]
    for axis, size in zip(axes, shape, strict=True):
        index = jnp.arange(size, dtype=jnp.uint32, out_sharding=layout((axis,), (size,)))
        bits = _mixed(bits[..., None] + index * np.uint32(0x9E3779B9) + key[1])
    return bits


def _mixed(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's last step, by which each bit of a word changes half of the others."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def keyed(model: Model, key: PRNGKeyArray) -> Model:
    """The model with a key in each of its dropouts, which follows from `key`, path and layer."""

    def draw(path, node):
        if not isinstance(node, Dropout) or node.rate == 0:
            return node
        own = jax.random.fold_in(key, number(path))
        each = jax.random.split(own, node.stack) if node.stack else own
        return dataclasses.replace(node, key=jax.random.key_data(each))

    return jax.tree_util.tree_map_with_path(
        draw, model, is_leaf=lambda node: isinstance(node, Dropout)
    )


def number(path: tuple) -> np.uint32:
    """The fold-in number of a path, by which the random numbers of parts differ."""
    return np.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))
