"""Masked tokens: a share of the tokens is hidden, and predicted from all the others."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from windlass.config import section
from windlass.layers.softmax import log_z, pick
from windlass.objectives import BaseObjective, Tally


@section
class Objective(BaseObjective):
    """Cross-entropy of masked tokens."""

    mask: int = 0  # the token in place of those that are hidden
    share: float = 0.15  # of tokens that are hidden

    columns: ClassVar[tuple[str, ...]] = ("tokens", "position", "document")

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        tokens = batch["tokens"]
        # In evaluation the same tokens are hidden after every step.
        hidden = self.hidden(tokens, step if key is not None else jnp.zeros_like(step))
        hidden &= batch["document"] >= 0
        states, auxiliary, _ = model(batch | {"tokens": jnp.where(hidden, self.mask, tokens)})
        columns = {"targets": tokens, "weight": hidden.astype(jnp.float32)}
        total, _ = model.head.reduce(self._tile, states, columns)
        return Tally(total, jnp.sum(columns["weight"]), {}, {}, auxiliary), carry

    def hidden(
        self, tokens: Int[Array, "batch seq"], step: Int[Array, ""]
    ) -> Bool[Array, "batch seq"]:
        """A draw by the step and by the row, the same in whatever microbatch the row is."""
        at = jnp.arange(tokens.shape[1], dtype=jnp.uint32)
        row = jnp.sum(tokens.astype(jnp.uint32) * _mixed(at + 1), axis=1, keepdims=True)
        drawn = _mixed(_mixed(row + step.astype(jnp.uint32)) + at)
        return drawn < jnp.uint32(self.share * 2**32)

    def _tile(self, logits, columns):
        entropy = log_z(logits) - pick(logits, columns["targets"])
        return entropy * columns["weight"], {}


def _mixed(x: Array) -> Array:
    """A hash of 32 bits."""
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return x ^ (x >> 16)
