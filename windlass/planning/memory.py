"""What a step holds in a device's memory at its worst moment, by what it is for."""

from typing import NamedTuple

from windlass.planning.traced import Traced


class Memory(NamedTuple):
    """Bytes on each device, by part; the parts are in the order in which they are told."""

    parts: dict[str, float]
    limit: int  # what a program may use of the device
    error: float  # the share by which `total` may be too low

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it fits for certain: also if the estimate is as much too low as it ever was."""
        return self.total * (1 + self.error) <= self.limit


def memory(traced: Traced) -> Memory:
    raise NotImplementedError
