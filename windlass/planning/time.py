"""How long a step takes, by what it waits for."""

from typing import NamedTuple

from windlass.planning.traced import Traced


class Time(NamedTuple):
    """Seconds of an optimiser step, by part; what is hidden behind something else is in no part."""

    parts: dict[str, float]
    error: float  # the share by which `seconds` may be wrong, either way
    bound: str  # what the step waits for most: compute, memory, communication or data
    flops: float  # that the model needs for the step, on all devices together

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def time(traced: Traced) -> Time:
    raise NotImplementedError
