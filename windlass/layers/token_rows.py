"""Trained rows of a frozen table of tokens: those of new tokens, say, in an embedding or a head."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from windlass.devices.axes import Placed, gathered, layout

AXES = ("vocab", "embed")


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
