"""How long a run is, and what becomes of its learning rate when it is made longer or shorter."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from windlass.run import Train


class Length(NamedTuple):
    """The steps of a run, and how many of them go once over its data."""

    steps: int
    per_epoch: int
    epochs: float | None  # where these were asked for

    @staticmethod
    def of(train: Train, per_epoch: int) -> "Length":
        """As a recipe says it. Epochs are of full batches, and a run has a step at least."""
        if train.epochs is None:
            assert train.steps is not None
            return Length(train.steps, per_epoch, None)
        # Decimals as they were written: in binary, 0.1 epochs of 30 steps are not quite 3.
        steps = math.floor(Fraction(str(train.epochs)) * per_epoch)
        return Length(max(1, steps), per_epoch, train.epochs)

    def __str__(self) -> str:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        if self.epochs is None:
            return steps
        return f"{steps}, {self.epochs:g} epoch{'s' * (self.epochs != 1)} of {self.per_epoch}"

    @property
    def asked(self) -> str:
        """What the recipe says, with its key."""
        if self.epochs is None:
            return f"train.steps is {self.steps}"
        return f"train.epochs is {self.epochs:g}, which is {self.steps} steps"

    def key(self, steps: int) -> str:
        """What to write for a run of so many steps."""
        if self.epochs is None:
            return f"train.steps={steps}"
        up = math.ceil(Fraction(10**6 * steps, self.per_epoch))  # rounded down it would be one less
        return f"train.epochs={up / 10**6:.12g}"


def fate(rate: Callable[[int], Callable[[int], Any]], before: int, after: int, done: int) -> str:
    """What another number of steps does to the schedule of a run that has done some, in a line.

    `rate(steps)` is the learning rate at each step of a run of so many.
    """
    was, is_now, at_end = (
        float(rate(steps)(step))
        for steps, step in ((before, done - 1), (after, done), (after, after - 1))
    )
    would_have_been = float(rate(before)(done))
    said = f"the run had {before} steps and has {after}: the learning rate"
    ending = f"it ends at {at_end:.3g} at step {after}"
    if math.isclose(is_now, would_have_been, rel_tol=1e-3):
        return f"{said} goes on at {is_now:.3g}; {ending}"
    rises = ", so it rises again" if would_have_been < was < is_now else ""
    return (
        f"{said} was {was:.3g} at step {done} and is {is_now:.3g} at step {done + 1}{rises}; "
        f"{ending}"
    )
