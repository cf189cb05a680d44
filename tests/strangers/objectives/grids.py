"""Fill in the blanks of a grid: every column of a puzzle is read."""

from typing import ClassVar

import jax.numpy as jnp

from windlass.config import section
from windlass.layers.softmax import log_z, pick
from windlass.objectives import BaseObjective, Tally


@section
class Objective(BaseObjective):
    """Cross-entropy of the blank cells, each worth 1 / the digits that its row leaves open."""

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "puzzle", "candidates"),
    )

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        free = jnp.sum(batch["candidates"].astype(jnp.float32), axis=-1)
        is_puzzle = (batch["puzzle"] >= 0)[:, None]
        weight = jnp.where(is_puzzle, batch["weight"] / jnp.maximum(free, 1.0), 0.0)
        total, sums = model.head.reduce(_tile, hidden, {"targets": batch["targets"], "w": weight})
        whole = jnp.sum(weight)
        means = {name: (value, whole) for name, value in sums.items()}
        puzzles = jnp.sum((batch["puzzle"] >= 0).astype(jnp.float32))
        means["open"] = (jnp.sum(jnp.where(is_puzzle, free, 0.0)), puzzles)
        return Tally(total, whole, means, {}, auxiliary), carry


def _tile(logits, columns):
    cross_entropy = (log_z(logits) - pick(logits, columns["targets"])) * columns["w"]
    return cross_entropy, {"cross_entropy": cross_entropy}
