"""Checkpoints of any pytree of arrays: saved in the background, hashed, verified when read."""

from windlass.config import Every, section


@section
class Checkpoint:
    """Checkpoint interval and retention; the end of a run and a stop by signal always save one."""

    every: Every = Every(500)  # interval; also a list, such as [50, 1 epoch]
    keep: int = 3  # newest checkpoints to keep, beside the one of the lowest validation loss

    def __post_init__(self):
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be 1 or more")
