"""A run made longer or shorter: what becomes of its learning rate."""

import math
from collections.abc import Callable
from typing import Any


def fate(rate: Callable[[int], Callable[[int], Any]], before: int, after: int, done: int) -> str:
    """What another number of steps does to the schedule of a run that has done some, in a line.

    `rate(steps)` is the learning rate at each step of a run of so many.
    """
    was, is_now, at_end = (
        float(rate(steps)(step))
        for steps, step in ((before, done - 1), (after, done), (after, after - 1))
    )
    would_have_been = float(rate(before)(done))
    said = f"train.steps was {before} and is {after}: the learning rate"
    ending = f"it ends at {at_end:.3g} at step {after}"
    if math.isclose(is_now, would_have_been, rel_tol=1e-3):
        return f"{said} goes on at {is_now:.3g}; {ending}"
    rises = ", so it rises again" if would_have_been < was < is_now else ""
    return (
        f"{said} was {was:.3g} at step {done} and is {is_now:.3g} at step {done + 1}{rises}; "
        f"{ending}"
    )
