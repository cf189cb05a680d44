"""Kahneman-Tversky optimization (KTO) on answers that are desirable or not, each by itself.

https://arxiv.org/abs/2402.01306
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from windlass.config import section
from windlass.formats.unpaired import UNDESIRABLE
from windlass.objectives import BaseObjective, Carry, Tally
from windlass.preferences import pairs


class Divergence(NamedTuple):
    """Estimate of the KL divergence: that of the last whole step, and the sums of this one."""

    kl: Float[Array, ""]
    total: Float[Array, ""]
    count: Float[Array, ""]
    step: Int[Array, ""]  # that the sums are of

    def at(self, step: Int[Array, ""]) -> "Divergence":
        """The estimate for a step: where the sums are of one before it, they are its estimate."""
        mean = jnp.maximum(self.total / jnp.maximum(self.count, 1.0), 0.0)
        begun = Divergence(mean, jnp.zeros_like(mean), jnp.zeros_like(mean), step)
        return jax.tree.map(lambda new, old: jnp.where(step == self.step, old, new), begun, self)


@section
class Objective(BaseObjective):
    """Kahneman-Tversky optimization: desirable answers gain, undesirable ones lose.

    With log-probabilities π of answers under the model and π₀ under its first weights, the reward
    of an answer is r = π - π₀, and its loss

        ℓ = λ_D (1 - σ(β (r - z)))  or  ℓ = λ_U (1 - σ(β (z - r)))

    of a desirable or an undesirable one. The point of reference z = max(0, mean r') is an estimate
    of KL(model ‖ first weights), over prompts with answers to other prompts. It has no gradient,
    and is that of the step before: what a batch is divided into then changes nothing. At the first
    step it is 0, which it is exactly.
    """

    beta: float = 0.1  # what a nat of log-probability is worth; the larger, the nearer to the start
    desirable_weight: float = 1.0  # λ_D: raise it where there are fewer desirable answers
    undesirable_weight: float = 1.0  # λ_U

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "reference"),
    )
    unit: ClassVar[str] = "answer"
    starts_from_data: ClassVar[bool] = False

    def __post_init__(self):
        values = {
            name: getattr(self, name) for name in ("beta", "desirable_weight", "undesirable_weight")
        }
        wrong = [f"{name} is {x}; it is a factor, above 0" for name, x in values.items() if x <= 0]
        if wrong:
            raise ValueError(*wrong)

    def start(self, model, batch):
        zero = jnp.float32(0)
        return Carry(sums=Divergence(zero, zero, zero, jnp.int32(0)))

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        is_trained = (batch["weight"] > 0).astype(jnp.float32)
        log_p = is_trained * model.head.log_probabilities(hidden, batch["targets"])
        gain = log_p - is_trained * batch["reference"]

        found = pairs([log_p, gain, batch["weight"], is_trained], batch["document"])
        (log_p, reward, weight, targets), (_, elsewhere, *_) = found.first, found.second
        is_desirable = found.average(weight, targets) < UNDESIRABLE
        known = carry.sums.at(step)
        sign = jnp.where(is_desirable, 1.0, -1.0)
        value = jax.nn.sigmoid(sign * self.beta * (reward - known.kl))
        factor = jnp.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        loss = factor * (1 - value)

        means = {"kl": (known.kl * found.count, found.count)}
        for name, which in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            count = found.total(which.astype(jnp.float32))
            means[f"rewards_{name}"] = found.total(jnp.where(which, self.beta * reward, 0.0)), count
            means[f"logps_{name}"] = found.total(jnp.where(which, log_p, 0.0)), count
        moved = jax.lax.stop_gradient(found.total(elsewhere))
        sums = known._replace(total=known.total + moved, count=known.count + found.count)
        return Tally(found.total(loss), found.count, means, {}, auxiliary), Carry(sums=sums)
