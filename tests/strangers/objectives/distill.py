"""Distillation from a live teacher, whose share of the loss falls over the run."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from windlass.config import section
from windlass.config.start import Start
from windlass.objectives import BaseObjective, Tally


@section
class Objective(BaseObjective):
    """Cross-entropy of the next token, and the divergence from a teacher's distribution.

    ℓ = (1 - a) CE + a T² KL(softmax(z_teacher / T) ‖ softmax(z / T)), a = share (1 - step / steps).
    """

    teacher: Start
    share: float = 0.8  # of the teacher, at step 0
    temperature: float = 2.0

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")

    @property
    def helpers(self):
        return {"teacher": self.teacher}

    def problems(self, model):
        return [] if model.causal else ["it must be causal, as its teacher is"]

    def evaluate(self, model, batch, *, carry, helpers, step, steps):
        # As at step 0, whenever it is: what is annealed could not be compared.
        start = jnp.int32(0)
        return super().evaluate(model, batch, carry=carry, helpers=helpers, step=start, steps=steps)

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        teaching, _, _ = helpers["teacher"](batch)
        logits, taught = model.head.logits(hidden), helpers["teacher"].head.logits(teaching)
        share = self.share * (1 - step.astype(jnp.float32) / steps)
        entropy = _cross_entropy(logits, batch["targets"])
        divergence = self.temperature**2 * _divergence(
            taught / self.temperature, logits / self.temperature
        )
        weight = jnp.sum(batch["weight"])

        def total(x):
            return jnp.sum(x * batch["weight"])

        sums = {
            "cross_entropy": (total(entropy), weight),
            "divergence": (total(divergence), weight),
        }
        loss = total((1 - share) * entropy + share * divergence)
        return Tally(loss, weight, sums, {"share": share}, auxiliary), carry


def _cross_entropy(logits, targets):
    here = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(here, logits, 0.0), axis=-1)


def _divergence(taught, logits):
    p, log_q = jax.nn.log_softmax(taught), jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(p) * (p - log_q), axis=-1)
