"""Next-token prediction: pretraining, and fine-tuning through the column `weight`."""

import math
from typing import ClassVar

import jax.numpy as jnp

from windlass.config import section
from windlass.layers.softmax import Statistics
from windlass.models import SharesTable
from windlass.objectives import BaseObjective, Tally

COLLAPSED = 1e-4  # nats from the log Z of equal logits: far less than an untrained model has


@section
class Objective(BaseObjective):
    """Cross-entropy of the next token.

    With logits a, their log-partition function z = log Σ_v exp a_v and the target y, a token has

        ℓ = (1 - s) (z - a_y) + s (z - mean_v a_v) + c z²

    where s is `label_smoothing` and c is `z_loss`.
    """

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
        if isinstance(model, SharesTable):
            model = model.looked_up(batch["tokens"])
        hidden, auxiliary, _ = model(batch)
        columns = {name: batch[name] for name in ("targets", "weight")}
        total, sums = model.head.reduce(self._tile, hidden, columns, statistics_of="targets")
        weight = jnp.sum(batch["weight"])
        means = {name: (value, weight) for name, value in sums.items()}
        return Tally(total, weight, means, {}, auxiliary), carry

    def _tile(self, logits, columns, statistics: Statistics):
        z, target_logit, highest = statistics
        cross_entropy = z - target_logit
        loss = cross_entropy + self.z_loss * z**2
        if self.label_smoothing:
            uniform = z - jnp.mean(logits, axis=-1)  # the cross-entropy with all tokens alike
            loss += self.label_smoothing * (uniform - cross_entropy)
        weight = columns["weight"]
        # Logits that have collapsed into one value would be right about every token: they are right
        # by chance. To count the ties of all others would read every tile once more.
        vocab = logits.shape[-1]
        is_best = (target_logit >= highest).astype(jnp.float32)
        is_collapsed = z - highest > math.log(vocab) - COLLAPSED
        accuracy = jnp.where(is_collapsed, 1 / vocab, is_best)
        sums = {"cross_entropy": cross_entropy * weight, "accuracy": accuracy * weight}
        return loss * weight, sums
