"""Embeddings: a row of a table for each token id, or for each position."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import Placed, gathered, layout, reduced, split_over, tensor_ways
from windlass.layers.initializers import Initializer, small


class Embedding(Placed):
    weight: Float[Array, "vocab embed"]
    scale: float = eqx.field(static=True)  # of the vectors that leave it
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        scale: float = 1.0,
        initializer: Initializer = small,
        key: PRNGKeyArray,
    ):
        width = sizes["embed"]
        self.weight = initializer(key, (sizes["vocab"], width), width)
        self.scale = scale

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("vocab", "embed")}

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        table = _Table(self.axes["weight"], len(self.weight), self.weight.dtype)
        rows: Any = _lookup(self.weight, tokens, table)
        # The scale in the precision of the weights, as the models that have one were trained.
        return rows * jnp.asarray(self.scale, rows.dtype)


class _Table(NamedTuple):
    """What is known of a table without its numbers."""

    axes: tuple[str, ...]
    size: int  # rows
    dtype: Any


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(weight: Array, tokens: Array, table: _Table) -> Array:
    """Rows of a table that is kept in pieces. Its gradient is summed into these pieces."""
    whole = gathered(weight, table.axes)
    out = layout("batch seq embed", (*tokens.shape, whole.shape[-1]))
    return whole.at[tokens].get(out_sharding=out)


def _lookup_backward(table: _Table, tokens: Array, gradient: Array) -> tuple[Array, None]:
    """Each group of devices adds up the gradients of its own rows, and all of them the sums.

    The first in float32: of a token that occurs a thousand times bfloat16 would lose most.
    """
    split = split_over("vocab", table.size)

    def own(tokens, gradient):
        size = table.size // (1 if split is None else tensor_ways())
        place = tokens - (0 if split is None else jax.lax.axis_index(split) * size)
        place = jnp.where((place >= 0) & (place < size), place, size)  # of another device: nowhere
        zeros = jnp.zeros((size, gradient.shape[-1]), jnp.float32)
        total = zeros.at[place].add(gradient.astype(jnp.float32), mode="drop")
        return total.astype(table.dtype)[None]

    rows = layout("batch", tokens.shape[:1])
    if rows is None:  # no mesh
        return own(tokens, gradient)[0], None
    specs = PartitionSpec(*rows, None), PartitionSpec(*rows, None, None)
    parts = jax.shard_map(own, in_specs=specs, out_specs=PartitionSpec(*rows, split, None))
    return reduced(parts(tokens, gradient), table.axes), None


_lookup.defvjp(
    lambda weight, tokens, table: (_lookup(weight, tokens, table), tokens), _lookup_backward
)


class LearnedPositions(Placed):
    """Learned positions: a vector for each; beyond the last one that is repeated."""

    weight: Float[Array, "positions embed"]
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self, sizes: dict[str, int], *, initializer: Initializer = small, key: PRNGKeyArray
    ):
        width = sizes["embed"]
        self.weight = initializer(key, (sizes["positions"], width), width)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("positions", "embed")}

    def __call__(self, position: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        weight = gathered(self.weight, self.axes["weight"])
        out = layout("batch seq embed", (*position.shape, weight.shape[-1]))
        # Through float32, as in the embedding of tokens: every row of a batch adds to the first.
        rows = weight.astype(jnp.float32).at[position].get(mode="clip", out_sharding=out)
        return rows.astype(weight.dtype)


class IdentifierPrefix(Placed):
    """A prefix of positions for each row, which its identifier decides; zeros at first.

    A vector of a table, with zeros behind it up to `positions` hidden states, cut into these.
    """

    weight: Float[Array, "identifiers width"]
    positions: int = eqx.field(static=True)
    embed: int = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, identifiers: int, width: int, *, positions: int, embed: int):
        self.weight = jnp.zeros((identifiers, width))
        self.positions, self.embed = positions, embed

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("identifiers", "embed")}

    def __call__(self, identifier: Int[Array, " batch"]) -> Float[Array, "batch prefix embed"]:
        weight = gathered(self.weight, self.axes["weight"])
        count, width = len(identifier), weight.shape[-1]
        rows = weight.astype(jnp.float32).at[identifier]
        rows = rows.get(mode="clip", out_sharding=layout("batch .", (count, width)))
        shape = (count, self.positions, self.embed)
        padded = jnp.pad(rows, ((0, 0), (0, self.positions * self.embed - width)))
        prefix = jnp.reshape(padded, shape, out_sharding=layout("batch . embed", shape))
        return prefix.astype(weight.dtype)
