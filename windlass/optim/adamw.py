"""AdamW."""

from typing import ClassVar

import optax

from windlass.config import section
from windlass.optim import Descent, Moment


@section
class Optimizer(Descent):
    """AdamW: weight decay on matrices only, clipping by global norm."""

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the denominator
    moment: Moment = "float32"  # dtype of the first moment

    shares: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    sizes: ClassVar[tuple[str, ...]] = ("eps",)

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.beta1, self.beta2, self.eps, mu_dtype=self.moment)
