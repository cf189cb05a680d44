"""Embeddings: a row of a table for each token id, or for each position.

Of a frozen table of tokens a few rows may be trained: those of new tokens, say.
"""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import (
    Placed,
    device,
    gathered,
    kept_apart,
    layout,
    like_weight,
    over_rows,
    split_over,
    stored,
    tensor_ways,
)
from windlass.layers.initializers import Initializer, small

AXES = ("vocab", "embed")
LANES = 128  # width of a TPU's registers


class TokenRows(Placed):
    """Rows in the place of a table's own, for a few tokens."""

    rows: Float[Array, "tokens embed"]
    ids: tuple[int, ...] = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(self, rows: Float[Array, "tokens embed"], ids: tuple[int, ...]):
        self.rows, self.ids = rows, ids

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"rows": ("", "embed")}

    def looked_up(
        self, tokens: Int[Array, "..."], others: Float[Array, "... embed"], vocab: int, axes: str
    ) -> Float[Array, "... embed"]:
        """Own rows at those of the tokens that have one, and `others` elsewhere."""
        place, out = self._places(vocab), layout(axes, others.shape)
        of_tokens = layout(axes.split()[:-1], tokens.shape)
        which = jnp.asarray(place).at[tokens].get(out_sharding=of_tokens)
        rows = gathered(self.rows, self.axes["rows"]).astype(jnp.float32)
        own = rows.at[jnp.maximum(which, 0)].get(out_sharding=out).astype(others.dtype)
        mask = jnp.broadcast_to((which >= 0)[..., None], others.shape)
        return jnp.where(mask if out is None else jax.sharding.reshard(mask, out), own, others)

    def _places(self, vocab: int) -> np.ndarray:
        """Number of each token's own row; -1: it has none."""
        place = np.full(vocab, -1, np.int32)
        place[list(self.ids)] = np.arange(len(self.ids))
        return place


class TokenTable(Placed):
    """A table with a row for each token, of which some may be trained apart."""

    weight: eqx.AbstractVar[Float[Array, "vocab embed"]]
    tuned: eqx.AbstractVar[TokenRows | None]

    @property
    def matrix(self) -> Float[Array, "vocab embed"]:
        """The whole table."""
        if self.tuned is None:
            return self.weight
        weight = gathered(self.weight, AXES)
        every = jnp.arange(len(weight), out_sharding=layout(AXES[:1], weight.shape[:1]))
        return self.tuned.looked_up(every, weight, len(weight), " ".join(AXES))

    def merged(self) -> Any:
        """The same table in one array."""
        return eqx.tree_at(_parts, self, (self.matrix, None), is_leaf=lambda x: x is None)

    def with_rows(self, ids: tuple[int, ...]) -> Any:
        """The table with rows of its own for these tokens, which begin as they are in it."""
        rows = self.weight.at[jnp.array(ids)].get(mode="clip").astype(jnp.float32)
        own = self.weight, TokenRows(rows, ids)
        return eqx.tree_at(_parts, self, own, is_leaf=lambda x: x is None)

    def without_rows(self) -> Any:
        return eqx.tree_at(lambda x: x.tuned, self, None, is_leaf=lambda x: x is None)


def _parts(table: TokenTable) -> tuple[Any, Any]:
    return table.weight, table.tuned


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
        rows = looked_up(self.weight, tokens, self.axes["weight"])
        if self.tuned is not None:
            rows = self.tuned.looked_up(tokens, rows, len(self.weight), "batch seq embed")
        # The scale in the precision of the weights, as the models that have one were trained.
        return rows * jnp.asarray(self.scale, rows.dtype)


def looked_up(
    weight: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], axes: tuple[str, ...]
) -> Float[Array, "batch seq embed"]:
    """Rows of a table by token.

    Their gradients are added in float32: bfloat16 would lose most of those of a token that occurs a
    thousand times.
    """
    table, out = jax.typeof(weight), layout("batch seq embed", (*tokens.shape, weight.shape[-1]))
    if not over_rows(len(tokens)):
        whole = gathered(weight, axes).astype(jnp.float32)
        return whole.at[tokens].get(out_sharding=out).astype(weight.dtype)

    @jax.custom_vjp
    def rows(weight, tokens):
        return gathered(weight, axes).at[tokens].get(out_sharding=out)

    rows.defvjp(
        lambda weight, tokens: (rows(weight, tokens), tokens),
        lambda tokens, d: (summed_by_token(tokens, d, table, axes), None),
    )
    return rows(weight, tokens)


def summed_by_token(
    tokens: Int[Array, "batch seq"],
    d: Float[Array, "batch seq embed"],
    weight: Any,
    axes: tuple[str, ...],
) -> Float[Array, "vocab embed"]:
    """Gradient of a table of which devices have rows of the batch, laid out as its weight is.

    Those that store columns of the table send each other these columns of the gradients of tokens,
    which are less than a table, and each adds up its own.
    """
    to = stored(axes, weight.shape) or weight.sharding.spec
    over = over_rows(len(tokens))
    columns, axis = to[1], split_over("vocab", weight.shape[0])
    is_sent = columns in over
    others = tuple(name for name in over if name != columns)
    size = weight.shape[0] // (tensor_ways() if axis else 1)

    def local(tokens, d):
        if is_sent:
            tokens = jax.lax.all_gather(tokens, columns, tiled=True)
            d = jax.lax.all_to_all(d, columns, split_axis=2, concat_axis=0, tiled=True)
        first = jax.lax.axis_index(axis) * size if axis else 0
        own = jnp.where(tokens < first, size, tokens - first)  # below 0 is counted from the end
        zeros = jnp.zeros((size, d.shape[-1]), jnp.float32)
        total = zeros.at[own].add(d.astype(jnp.float32), mode="drop").astype(d.dtype)
        return jax.lax.psum(total, others)

    specs = PartitionSpec(over), PartitionSpec(over, None, None if is_sent else columns)
    arrays = map(jax.sharding.reshard, (tokens, d), specs)
    found = jax.shard_map(local, in_specs=specs, out_specs=to, check_vma=False)(*arrays)
    if device().platform == "tpu" and weight.sharding.shard_shape(weight.shape)[1] % LANES:
        # A table of such columns is stored in the other order, without gaps: left to itself libtpu
        # copies it and its moments to the order in which rows are added.
        found = with_layout_constraint(found, Layout(major_to_minor=(1, 0)))
    return like_weight(kept_apart(found), weight)


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
