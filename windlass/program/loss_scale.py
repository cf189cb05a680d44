"""The loss scale of float16, in which small gradients are zero and large ones infinite."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

START = 2.0**16
FLOOR = 1.0  # below it a loss that is not finite is not the scale's doing
GROWS_AFTER = 2000  # steps


class LossScale(NamedTuple):
    """Dynamic loss scale: the factor of the mean loss before its gradient is taken."""

    scale: Float[Array, ""]
    steady: Int[Array, ""]  # steps since it last changed
    overflows: Int[Array, ""]  # steps whose gradient was left out, and the scale halved

    @staticmethod
    def start() -> "LossScale":
        return LossScale(jnp.float32(START), jnp.int32(0), jnp.int32(0))

    def overflowed(self, is_finite: Bool[Array, ""]) -> Bool[Array, ""]:
        """Overflow of a step: it is not finite, and a smaller scale may help."""
        return ~is_finite & (self.scale > FLOOR)

    def after(self, is_finite: Bool[Array, ""]) -> "LossScale":
        """The scale for the next step: halved, doubled when long steady, or the same."""
        overflowed = self.overflowed(is_finite)
        steady = jnp.where(is_finite, self.steady + 1, 0)
        grows = steady >= GROWS_AFTER
        factor = jnp.where(overflowed, 0.5, jnp.where(grows, 2.0, 1.0))
        return LossScale(
            jnp.maximum(self.scale * factor, FLOOR),
            jnp.where(grows, 0, steady),
            self.overflows + overflowed.astype(jnp.int32),
        )

    def metrics(self) -> dict[str, Array]:
        return {"loss_scale": self.scale, "overflows": self.overflows}
