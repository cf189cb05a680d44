"""AdamW. https://arxiv.org/abs/1711.05101"""

from typing import ClassVar

import optax

from windlass import optim
from windlass.config import section
from windlass.optim import Descent, Moment


@section
class Rule(optim.Rule):
    """Adam: the mean of gradients over the root of the mean of their squares.

    m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g² give the direction m̂ / (√v̂ + ε), with
    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ) at update t.
    """

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the denominator
    moment: Moment = "float32"  # dtype of the first moment

    shares: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    sizes: ClassVar[tuple[str, ...]] = ("eps",)

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.beta1, self.beta2, self.eps, mu_dtype=self.moment)


@section
class Optimizer(Rule, Descent):
    """AdamW: decay on matrices only, one global clip."""
