"""Sign descent: every number moves by the learning rate, up or down, and nothing is kept."""

import optax

from windlass import optim
from windlass.config import section
from windlass.optim import Descent


@section
class Rule(optim.Rule):
    """The sign of the gradient."""

    def direction(self):
        return optax.scale_by_sign()


@section
class Optimizer(Rule, Descent):
    """Sign descent."""
