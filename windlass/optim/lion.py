"""Lion: the sign of a mean of gradients. https://arxiv.org/abs/2302.06675"""

from typing import ClassVar

import optax

from windlass.config import section
from windlass.optim import Descent, Moment


@section
class Optimizer(Descent):
    """Lion: every number moves by the learning rate, up or down; one moment to store.

    Its learning rate is a third to a tenth of AdamW's, and its decay as much larger.
    """

    beta1: float = 0.9  # share of the momentum in the sign
    beta2: float = 0.99  # decay of the momentum
    moment: Moment = "float32"  # dtype of the momentum

    shares: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.beta1, self.beta2, mu_dtype=self.moment)
