"""Adam-atan2: Adam without an epsilon. https://arxiv.org/abs/2407.05872"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from windlass import optim
from windlass.config import section
from windlass.optim import Descent, Moment


@section
class Rule(optim.Rule):
    """Adam with atan2 in place of the division, which no gradient is too small for.

    m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g² give the direction a · atan2(m̂, √v̂), with
    m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ) at update t. A gradient of any scale gives the same.
    """

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    scale: float = 1.27  # the factor a: 4 / π, so that a steady gradient moves by the learning rate
    moment: Moment = "float32"  # dtype of the first moment

    shares: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    sizes: ClassVar[tuple[str, ...]] = ("scale",)

    def direction(self) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(self.beta1, self.beta2, mu_dtype=self.moment)

        def update(updates, state, params=None):
            _, new = adam.update(updates, state, params)
            assert isinstance(new, optax.ScaleByAdamState)
            # Not of the moment as it is stored, which may be rounded.
            mean = optax.tree.update_moment(updates, state.mu, self.beta1, 1)
            mean = optax.tree.bias_correction(mean, self.beta1, new.count)
            square = optax.tree.bias_correction(new.nu, self.beta2, new.count)

            def angle(m, v):
                return self.scale * jnp.arctan2(m, jnp.sqrt(v))

            return jax.tree.map(angle, mean, square), new

        return optax.GradientTransformation(adam.init, update)


@section
class Optimizer(Rule, Descent):
    """Adam-atan2: decay on matrices only, one global clip."""
