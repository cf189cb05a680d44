"""Sparse sign descent: for tables of which a batch reads few rows, such as those of identifiers."""

from typing import ClassVar

import jax.numpy as jnp
import optax

from windlass import optim
from windlass.config import section
from windlass.optim import Descent


@section
class Rule(optim.Rule):
    """Sign descent on the rows of a table that have a gradient; nothing is kept.

    w ← w - η (sign(g) + λ w) for a row w with g ≠ 0, and the others stay, undecayed. A row is all
    that differs in the last axis alone. The gradient of a table says how often its rows were read,
    and not how long the step of other weights should be: as a group it is outside of the clip.
    """

    clipped: ClassVar[bool] = False

    def direction(self) -> optax.GradientTransformation:
        return optax.scale_by_sign()

    def decayed(self, weight, direction):
        return weight * jnp.any(direction != 0, axis=-1, keepdims=True)


@section
class Optimizer(Rule, Descent):
    """Sign descent: decay of rows that have a gradient alone."""
