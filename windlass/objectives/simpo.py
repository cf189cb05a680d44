"""Simple preference optimization (SimPO), without a reference. https://arxiv.org/abs/2405.14734"""

from typing import ClassVar

import jax

from windlass.config import section
from windlass.objectives import BaseObjective, Tally
from windlass.preferences import pairs


@section
class Objective(BaseObjective):
    """Simple preference optimization: the reward is the log-probability per target.

    With log-probabilities π of answers of n targets under the model, a pair has

        m = β (π_chosen / n_chosen - π_rejected / n_rejected) - γ
        ℓ = -(1 - s) log σ(m) - s log σ(-m)

    where s is `label_smoothing`. Nothing is compared with the first weights, of which nothing is
    computed either.
    """

    beta: float = 2.0  # what a nat of log-probability per target is worth
    gamma: float = 1.0  # the margin by which the chosen answer is to win, in rewards
    label_smoothing: float = 0.0  # the share of pairs that are taken to be the wrong way round

    columns: ClassVar[tuple[str, ...]] = ("tokens", "targets", "weight", "position", "document")
    spares: ClassVar[tuple[str, ...]] = ("reference",)
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        wrong = []
        if self.beta <= 0:
            wrong.append(f"beta is {self.beta}; it is a factor, above 0")
        if self.gamma < 0:
            wrong.append(f"gamma is {self.gamma}; it is a margin, 0 or more")
        if not 0 <= self.label_smoothing < 0.5:
            wrong.append(
                f"label_smoothing is {self.label_smoothing}; it is a share, 0 or more and below 0.5"
            )
        if wrong:
            raise ValueError(*wrong)

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        log_p = batch["weight"] * model.head.log_probabilities(hidden, batch["targets"])

        found = pairs([log_p, batch["weight"]], batch["document"])
        chosen, rejected = found.average(*found.first), found.average(*found.second)
        margin = self.beta * (chosen - rejected) - self.gamma
        loss = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin)
        if self.label_smoothing:
            loss -= self.label_smoothing * jax.nn.log_sigmoid(-margin)
        means = found.means((self.beta * chosen, self.beta * rejected), (chosen, rejected))
        return Tally(found.total(loss), found.count, means, {}, auxiliary), carry
