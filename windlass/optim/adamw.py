"""AdamW."""

import optax

from windlass.config import section
from windlass.devices.axes import matrices
from windlass.optim import Schedule


@section
class Optimizer:
    """AdamW: decay on matrices only, one global clip."""

    learning_rate: float  # at its peak
    beta1: float = 0.9  # how much of the mean of gradients is kept at each step
    beta2: float = 0.95  # and of the mean of their squares
    eps: float = 1e-8  # added to the root of that mean
    weight_decay: float = 0.1  # norms and biases are never decayed
    clip_norm: float | None = 1.0  # of the whole gradient; null: no clipping
    schedule: Schedule = Schedule()

    def __post_init__(self):
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share, below 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; above 0, or null for no clipping")

    def rate(self, steps: int):
        share = self.schedule.over(steps)
        return lambda step: self.learning_rate * share(step)

    def build(self, steps: int) -> optax.GradientTransformation:
        adamw = optax.adamw(
            self.rate(steps),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=matrices,
        )
        clip = [] if self.clip_norm is None else [optax.clip_by_global_norm(self.clip_norm)]
        return optax.chain(*clip, adamw)
