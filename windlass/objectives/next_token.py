"""Predict each token from those before it: pretraining, and fine-tuning through `weight`."""

from typing import ClassVar

import jax.numpy as jnp

from windlass.config import section
from windlass.layers.head import log_z, pick
from windlass.objectives import Contract, Tally


@section
class Objective(Contract):
    """Cross-entropy of the next token."""

    z_loss: float = 0.0  # times the square of log Z: keeps logits from drifting
    label_smoothing: float = 0.0  # the share of a target that is spread over the vocabulary

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")

    def __post_init__(self):
        if self.z_loss < 0:
            raise ValueError(f"z_loss is {self.z_loss}; it is a factor, 0 or more")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}; it is a share, 0 or more and below 1"
            )

    def problems(self, model):
        what = "it is bidirectional (causal is false), and so attends to the token it would predict"
        return [] if model.causal else [what]

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        columns = {name: batch[name] for name in ("targets", "weight")}
        total, sums = model.head.reduce(self._tile, hidden, columns)
        weight = jnp.sum(batch["weight"])
        means = {name: (value, weight) for name, value in sums.items()}
        return Tally(total, weight, means, {}, auxiliary), carry

    def _tile(self, logits, columns):
        z, chosen = log_z(logits), pick(logits, columns["targets"])
        entropy = z - chosen
        loss = entropy + self.z_loss * z**2
        if self.label_smoothing:
            spread = z - jnp.mean(logits, axis=-1)
            loss += self.label_smoothing * (spread - entropy)
        weight = columns["weight"]
        best = (chosen >= jnp.max(logits, axis=-1)).astype(jnp.float32)
        return loss * weight, {"cross_entropy": entropy * weight, "accuracy": best * weight}
