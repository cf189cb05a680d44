"""Checkpoints of any tree of arrays: how often, how many, and none that is believed unchecked."""

from windlass.config import Every, section


@section
class Checkpoint:
    """When a run saves itself; the end of a run and a stop by signal always do."""

    every: Every = Every(500)  # how often, beside those; also a list, such as [50, 1 epoch]
    keep: int = 3  # the newest ones; the one with the lowest validation loss stays beside them

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be 1 or more")
