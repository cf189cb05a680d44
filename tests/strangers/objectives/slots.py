"""Rows with a memory: each place of the batch keeps a state from step to step."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from windlass.config import section
from windlass.layers.softmax import log_z, pick
from windlass.objectives import BaseObjective, Carry, Tally


@section
class Objective(BaseObjective):
    """Cross-entropy, and a pull of each row's mean hidden state to that of the rows before it."""

    pull: float = 0.1
    keep: float = 0.5  # of the state, at each step

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")

    def start(self, model, batch):
        hidden, _, _ = model(batch)
        rows = {
            "state": _mean(hidden, batch["weight"]),
            "steps": jnp.zeros_like(batch["tokens"][:, 0]),
        }
        return Carry(rows, {"seen": jnp.float32(0), "counts": jnp.zeros(8, jnp.float32)})

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        columns = {name: batch[name] for name in ("targets", "weight")}
        total, sums = model.head.reduce(_tile, hidden, columns)
        mean = _mean(hidden, batch["weight"])
        apart = jnp.sum((mean - carry.rows["state"]) ** 2)
        weight = jnp.sum(batch["weight"])
        kept = self.keep * carry.rows["state"] + (1 - self.keep) * jax.lax.stop_gradient(mean)
        rows = {"state": kept, "steps": carry.rows["steps"] + 1}
        seen = {
            "seen": carry.sums["seen"] + weight,
            "counts": carry.sums["counts"] + _counts(batch["tokens"] % 8, batch["weight"]),
        }
        means = {name: (value, weight) for name, value in sums.items()} | {"apart": (apart, weight)}
        total = total + self.pull * apart
        return Tally(total, weight, means, {"seen": seen["seen"]}, auxiliary), Carry(rows, seen)


def _tile(logits, columns):
    entropy = (log_z(logits) - pick(logits, columns["targets"])) * columns["weight"]
    return entropy, {"cross_entropy": entropy}


def _mean(hidden, weight):
    """Of each row, the mean of the hidden states that are trained on."""
    x = hidden.astype(jnp.float32) * weight[..., None]
    return jnp.sum(x, axis=1) / jnp.maximum(jnp.sum(weight, axis=1), 1.0)[:, None]


def _counts(numbers, weight):
    is_one = numbers[..., None] == jnp.arange(8)
    return jnp.sum(jnp.where(is_one, weight[..., None], 0.0), axis=(0, 1))
