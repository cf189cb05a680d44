"""Checkpoints of any pytree of arrays: saved in the background, hashed, verified when read."""

from windlass.config import Every, section


@section
class Checkpoint:
    """Checkpoint interval and retention; the end of a run and a stop by signal always save one."""

    # interval, or a list of several, each of which counts for itself; a kill -9 loses what came
    # after the newest checkpoint
    every: Every = Every(500, also=(Every(15, "min"),))
    keep: int = 3  # newest checkpoints to keep, beside the one of the lowest validation loss

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be 1 or more")
