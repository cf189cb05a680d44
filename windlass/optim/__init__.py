"""The optimisers. One file each; `optim.kind` in a recipe is the file's name.

A file defines `Optimizer`: a section with `rate(steps)`, the learning rate at a step of a run of so
many, and `build(steps) -> optax.GradientTransformation`.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from windlass.config import section


@section
class Schedule:
    """A share of the peak learning rate, counted in optimiser steps."""

    warmup_steps: int | None = None  # of a linear rise; with warmup_share too, the fewer
    warmup_share: float | None = None  # of the run, rounded up
    start: float = 0.0  # where the rise begins, as a share of the peak
    shape: Literal["constant", "cosine", "linear"] = "cosine"  # of the fall
    decay_share: float = 1.0  # of the steps after the rise; before it a plateau
    floor: float = 0.0  # where the fall ends, as a share of the peak

    def __post_init__(self):
        for name in ("warmup_share", "start", "decay_share", "floor"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it is a share, 0 to 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it is a count, 0 or more")

    def warmup(self, steps: int) -> int:
        share = self.warmup_share
        # Rounded first: 0.07 of 100 steps is 7.000000000000001 in binary, and would be 8.
        part = None if share is None else math.ceil(round(share * steps, 6))
        return min((n for n in (self.warmup_steps, part) if n is not None), default=0)

    def over(self, steps: int) -> Callable[[Int[Array, ""]], Float[Array, ""]]:
        """The share of the peak at step s of a run of so many steps."""
        rise = self.warmup(steps)
        fall = max(1.0, self.decay_share * (steps - rise))  # at least a step: rise may be all

        def share(step):
            s = jnp.asarray(step, jnp.float32)
            rising = self.start + (1 - self.start) * s / max(1, rise)
            p = jnp.clip((s - (steps - fall)) / fall, 0.0, 1.0)
            left = {
                "constant": jnp.ones_like(p),
                "cosine": (1 + jnp.cos(jnp.pi * p)) / 2,
                "linear": 1 - p,
            }[self.shape]
            return jnp.where(s < rise, rising, self.floor + (1 - self.floor) * left)

        return share
