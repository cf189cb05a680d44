"""Identity preference optimization (IPO) on pairs of answers. https://arxiv.org/abs/2310.12036"""

from typing import ClassVar

from windlass.config import section
from windlass.objectives import BaseObjective, Tally
from windlass.preferences import pairs


@section
class Objective(BaseObjective):
    """Identity preference optimization, of chosen answers over rejected ones.

    With log-probabilities π of answers under the model and π₀ under its first weights, both per
    target, a pair has

        h = (π - π₀)_chosen / n_chosen - (π - π₀)_rejected / n_rejected,  ℓ = (h - 1 / 2β)²

    The margin between the answers is drawn towards 1 / 2β rather than without end, so that pairs on
    which everybody agrees do not take a model ever further from where it began.
    """

    beta: float = 0.1  # regularization (the paper's τ); the larger, the nearer to the start

    columns: ClassVar[tuple[str, ...]] = (
        *("tokens", "targets", "weight", "position", "document", "reference"),
    )
    unit: ClassVar[str] = "pair"

    def __post_init__(self):
        if self.beta <= 0:
            raise ValueError(f"beta is {self.beta}; it is a factor, above 0")

    def __call__(self, model, batch, *, key, carry, helpers, step, steps):
        hidden, auxiliary, _ = model(batch)
        log_p = batch["weight"] * model.head.log_probabilities(hidden, batch["targets"])
        gain = log_p - batch["weight"] * batch["reference"]

        found = pairs([log_p, gain, batch["weight"]], batch["document"])
        (chosen, more, targets), (rejected, less, others) = found.first, found.second
        apart = found.average(more, targets) - found.average(less, others)
        loss = (apart - 1 / (2 * self.beta)) ** 2
        means = found.means((self.beta * more, self.beta * less), (chosen, rejected))
        return Tally(found.total(loss), found.count, means, {}, auxiliary), carry
