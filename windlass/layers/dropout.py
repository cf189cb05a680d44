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
        key, keep = jax.random.wrap_key_data(self.key), 1 - self.rate
        is_kept = jax.random.bernoulli(key, keep, x.shape, out_sharding=layout(axes, x.shape))
        return jnp.where(is_kept, x / keep, jnp.zeros_like(x))


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
