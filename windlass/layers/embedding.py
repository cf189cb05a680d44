"""Embeddings: a row of a table for each token id, or for each position."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import (
    Placed,
    gathered,
    layout,
    reduce_scattered,
    split_over,
    tensor_ways,
)
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

    @jax.named_scope("embedding")
    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        rows = looked_up(self.weight, tokens, self.axes["weight"])
        # The scale in the precision of the weights, as the models that have one were trained.
        return rows * jnp.asarray(self.scale, rows.dtype)


def looked_up(
    weight: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], axes: tuple[str, ...]
) -> Float[Array, "batch seq embed"]:
    """Rows of a table by token. Their gradients are added where they are, then reduce-scattered.

    In float32: bfloat16 would lose most of the gradients of a token that occurs a thousand times.
    """
    shape = weight.shape

    @jax.custom_vjp
    def rows(weight, tokens):
        out = layout("batch seq embed", (*tokens.shape, shape[-1]))
        return gathered(weight, axes).at[tokens].get(out_sharding=out)

    def backward(tokens, d):
        return reduce_scattered(_by_token(tokens, d, shape[0]).astype(d.dtype), axes), None

    rows.defvjp(lambda weight, tokens: (rows(weight, tokens), tokens), backward)
    return rows(weight, tokens)


def _by_token(
    tokens: Int[Array, "batch seq"], d: Float[Array, "batch seq embed"], vocab: int
) -> Float[Array, "shards vocab embed"]:
    """Sums of the gradients of each token, for each group of devices that has rows of its own."""
    axis = split_over("vocab", vocab)
    size = vocab // (tensor_ways() if axis else 1)

    def local(tokens, d):
        first = jax.lax.axis_index(axis) * size if axis else 0
        own = jnp.where(tokens < first, size, tokens - first)  # below 0 is counted from the end
        zeros = jnp.zeros((size, d.shape[-1]), jnp.float32)
        return zeros.at[own].add(d.astype(jnp.float32), mode="drop")[None]

    spec = layout(("batch", "", ""), d.shape)
    if spec is None:
        return local(tokens, d)
    specs = PartitionSpec(*spec[:2]), spec
    arrays = map(jax.sharding.reshard, (tokens, d), specs)
    out = PartitionSpec(spec[0], axis, None)
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*arrays)


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

    @jax.named_scope("embedding")
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

    @jax.named_scope("embedding")
    def __call__(self, identifier: Int[Array, " batch"]) -> Float[Array, "batch prefix embed"]:
        weight = gathered(self.weight, self.axes["weight"])
        count, width = len(identifier), weight.shape[-1]
        rows = weight.astype(jnp.float32).at[identifier]
        rows = rows.get(mode="clip", out_sharding=layout("batch .", (count, width)))
        shape = (count, self.positions, self.embed)
        padded = jnp.pad(rows, ((0, 0), (0, self.positions * self.embed - width)))
        prefix = jnp.reshape(padded, shape, out_sharding=layout("batch . embed", shape))
        return prefix.astype(weight.dtype)
