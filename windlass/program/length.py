"""Length of a run, and the learning rate of one that is made longer or shorter."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from windlass.run import Train


class Length(NamedTuple):
    """The steps of a run, and how many of them go once over its data."""

    steps: int
    per_epoch: int
    epochs: float | None  # None where steps were requested

    @staticmethod
    def of(train: Train, per_epoch: int) -> "Length":
        """Length of a recipe. Epochs are of full batches, and a run has a step at least."""
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
    def requested(self) -> str:
        """The requested length, with its key."""
        if self.epochs is None:
            return f"train.steps is {self.steps}"
        return f"train.epochs is {self.epochs:g}, which is {self.steps} steps"

    def key(self, steps: int) -> str:
        """The override that makes a run of another number of steps."""
        if self.epochs is None:
            return f"train.steps={steps}"
        up = math.ceil(Fraction(10**6 * steps, self.per_epoch))  # rounded down it would be one less
        return f"train.epochs={up / 10**6:.12g}"


def schedule_change(
    rate: Callable[[int], Callable[[int], Any]], before: int, after: int, done: int
) -> str:
    """Learning-rate schedule of a run that has done some steps and gets another number, in a line.

    `rate(steps)` is the learning rate at each step of a run of that many.
    """
    was, is_now, at_end = (
        float(rate(steps)(step))
        for steps, step in ((before, done - 1), (after, done), (after, after - 1))
    )
    would_have_been = float(rate(before)(done))
    change = f"the run had {before} steps and has {after}: the learning rate"
    ending = f"it ends at {at_end:.3g} at step {after}"
    if math.isclose(is_now, would_have_been, rel_tol=1e-3):
        return f"{change} goes on at {is_now:.3g}; {ending}"
    rises = ", so it rises again" if would_have_been < was < is_now else ""
    return (
        f"{change} was {was:.3g} at step {done} and is {is_now:.3g} at step {done + 1}{rises}; "
        f"{ending}"
    )
