"""AdamW."""

from typing import ClassVar

import optax

from windlass.config import section
from windlass.optim import Descent, Moment


@section
class Optimizer(Descent):
    """AdamW: decay on matrices only, one global clip."""

    beta1: float = 0.9  # how much of the mean of gradients is kept at each step
    beta2: float = 0.95  # and of the mean of their squares
    eps: float = 1e-8  # added to the root of that mean
    moment: Moment = "float32"  # what the mean of gradients is stored in

    shares: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    sizes: ClassVar[tuple[str, ...]] = ("eps",)

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.beta1, self.beta2, self.eps, mu_dtype=self.moment)
