"""Embeddings: a row of a table for each token id, or for each position."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import Placed, gathered, layout
from windlass.layers.initializers import Initializer, small
from windlass.layers.token_rows import TokenRows, TokenTable


class Embedding(TokenTable):
    weight: Float[Array, "vocab embed"]
    tuned: TokenRows | None
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
        self.tuned, self.scale = None, scale

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("vocab", "embed")}

    @jax.named_scope("embedding")
    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        weight = gathered(self.weight, self.axes["weight"])
        out = layout("batch seq embed", (*tokens.shape, weight.shape[-1]))
        # Through float32, so that the gradients of a token that occurs a thousand times are added
        # in float32: bfloat16 would lose most of them.
        rows = weight.astype(jnp.float32).at[tokens].get(out_sharding=out)
        if self.tuned is not None:
            rows = self.tuned.looked_up(tokens, rows, len(weight), "batch seq embed")
        # The scale in the precision of the weights, as the models that have one were trained.
        return rows.astype(weight.dtype) * jnp.asarray(self.scale, weight.dtype)


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
