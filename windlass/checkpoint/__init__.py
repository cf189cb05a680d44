"""Checkpoints of any tree of arrays: how often, how many, and none that is believed unchecked."""

from windlass.config import section


@section
class Checkpoint:
    """When a run saves itself; the end of a run and a stop by signal always do."""

    every: int = 500  # optimiser steps
    keep: int = 3  # the newest ones; the one with the lowest validation loss stays beside them

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
