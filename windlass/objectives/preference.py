"""Direct preference optimization (DPO) on pairs of answers. https://arxiv.org/abs/2305.18290"""

from typing import ClassVar

import jax

from windlass.config import section
from windlass.objectives import BaseObjective, Tally
from windlass.preferences import pairs


@section
class Objective(BaseObjective):
    """Direct preference optimization, of chosen answers over rejected ones.

    With log-probabilities π of answers under the model and π₀ under its first weights, a pair has

        margin m = β ((π - π₀)_chosen - (π - π₀)_rejected),  ℓ = -(1 - s) log σ(m) - s log σ(-m)

    where s is `label_smoothing`.

    A pair is two documents of a row, one behind the other, numbered 2i and 2i + 1: the first was
    chosen. `reference` has the log-probability of every target under the weights that the run
    started from, so that only one model is ever in memory.
    """

    beta: float = 0.1  # what a nat of log-probability is worth; the larger, the nearer to the start
    label_smoothing: float = 0.0  # the share of pairs that are taken to be the wrong way round

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "reference"),
    )
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        wrong = []
        if self.beta <= 0:
            wrong.append(f"beta is {self.beta}; it is a factor, above 0")
        if not 0 <= self.label_smoothing < 0.5:
            wrong.append(
                f"label_smoothing is {self.label_smoothing}; it is a share, 0 or more and below 0.5"
            )
        if wrong:
            raise ValueError(*wrong)

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        log_p = batch["weight"] * model.head.log_probabilities(hidden, batch["targets"])
        gain = log_p - batch["weight"] * batch["reference"]

        found = pairs([log_p, gain], batch["document"])
        (chosen, more), (rejected, less) = found.first, found.second
        margin = self.beta * (more - less)
        loss = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin)
        if self.label_smoothing:
            loss -= self.label_smoothing * jax.nn.log_sigmoid(-margin)
        means = found.means((self.beta * more, self.beta * less), (chosen, rejected))
        return Tally(found.total(loss), found.count, means, {}, auxiliary), carry
