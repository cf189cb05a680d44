"""Odds ratio preference optimization (ORPO): fine-tuning and preferences in one loss.

https://arxiv.org/abs/2403.07691
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from windlass.config import section
from windlass.objectives import BaseObjective, Tally
from windlass.preferences import pairs


@section
class Objective(BaseObjective):
    """Odds ratio preference optimization: cross-entropy of the chosen answer, and its odds.

    With π the mean log-probability of an answer's targets under the model, a pair has

        ℓ = NLL_chosen - β log σ(log odds_chosen - log odds_rejected),  odds = exp π / (1 - exp π)

    where NLL is the mean cross-entropy of the targets of the chosen document.
    """

    beta: float = 0.1  # weight of the odds ratio (the paper's λ)
    # count the prompt in the cross-entropy too, as the paper's own program and TRL do; false: the
    # answer alone
    prompt: bool = True

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")
    spares: ClassVar[tuple[str, ...]] = ("reference",)
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}; it is a factor, above 0")

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        each, weight = model.head.log_probabilities(hidden, batch["targets"]), batch["weight"]
        fitted = jnp.ones_like(weight) if self.prompt else weight

        found = pairs([weight * each, weight, fitted * each, fitted], batch["document"])
        chosen, rejected = found.average(*found.first[:2]), found.average(*found.second[:2])
        log_odds = _log_odds(chosen) - _log_odds(rejected)
        nll = -found.average(*found.first[2:])
        loss = nll - self.beta * jax.nn.log_sigmoid(log_odds)
        means = found.means((self.beta * chosen, self.beta * rejected), (chosen, rejected))
        further = {"nll_chosen": nll, "log_odds": log_odds}
        means |= {name: (found.total(x), found.count) for name, x in further.items()}
        return Tally(found.total(loss), found.count, means, {}, auxiliary), carry


def _log_odds(log_p: Float[Array, "..."]) -> Float[Array, "..."]:
    """log(p / (1 - p)), of a mean of log-probabilities."""
    # An answer that is certain, to the last bit of float32, has odds without end.
    log_p = jnp.minimum(log_p, -1e-7)
    return log_p - jnp.log(-jnp.expm1(log_p))
