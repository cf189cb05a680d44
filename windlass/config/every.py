"""Intervals, in steps, epochs or minutes."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from windlass.config.reading import closest
from windlass.config.sections import Spelled

# How a unit is written, and what else it may be called.
_UNITS = {
    "steps": ("step",),
    "epochs": ("epoch",),
    "s": ("second", "seconds"),
    "min": ("minute", "minutes"),
    "h": ("hour", "hours"),
}
_NAMES = {name: unit for unit, more in _UNITS.items() for name in (unit, *more)}
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_ONE = [
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": rf"^({_NUMBER}) *({'|'.join(_NAMES)})?$"},
]


@dataclass(frozen=True)
class Every(Spelled):
    """An interval as a recipe has it: `50`, `50 steps`, `0.5 epochs`, `15min`, or a list of some.

    Of a list, such as `[50, 1 epoch]`, each counts for itself.
    """

    words: ClassVar[str] = (
        "a number of steps, or text such as 5 epochs, 15min or 2h, or a list of these"
    )
    schema: ClassVar[dict[str, Any]] = {
        "anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}, "minItems": 1}]
    }

    number: int | float
    unit: str = "steps"
    also: tuple["Every", ...] = ()  # the others of a list

    @classmethod
    def read(cls, value: Any) -> "Every":
        if not isinstance(value, list | tuple):
            return cls._one(value)
        if not value:
            raise ValueError(f"it must be {cls.words}")
        first, *others = (cls._one(item) for item in value)
        return replace(first, also=tuple(others))

    @classmethod
    def _one(cls, value: Any) -> "Every":
        parts = re.fullmatch(rf"\s*({_NUMBER})\s*([^\W\d]*)\s*", str(value))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            number, name = value, "steps"
        elif isinstance(value, str) and parts:
            number, name = float(parts[1]), parts[2] or "steps"
        else:
            raise ValueError(f"it must be {cls.words}")
        if name not in _NAMES:
            meant = closest(name, _NAMES)
            shown = meant and _joined(f"{number:g}", meant)
            raise ValueError(f"did you mean {shown}?" if shown else f"it must be {cls.words}")
        unit = _NAMES[name]
        if unit == "steps" and (number < 1 or number != int(number)):
            raise ValueError("a number of steps is whole, 1 or more")
        if number <= 0:
            raise ValueError("it must be above 0")
        return cls(int(number) if number == int(number) else number, unit)

    @property
    def is_timed(self) -> bool:
        """Return True if the interval, or one of its list, is a time."""
        return self.unit in _SECONDS or any(other.is_timed for other in self.also)

    def seconds(self, step: int | float, steps_per_epoch: int | None) -> int | float | None:
        """Seconds between two occurrences, given a step's; None where that cannot be known."""
        units = {**_SECONDS, "steps": step}
        if steps_per_epoch is not None:
            units["epochs"] = step * steps_per_epoch
        several = [self, *self.also]
        return min(
            (one.number * units[one.unit] for one in several if one.unit in units), default=None
        )

    def written(self) -> Any:
        own = self.number if self.unit == "steps" else _joined(self.number, self.unit)
        return [own, *(other.written() for other in self.also)] if self.also else own


class Due:
    """Timer: true when an interval has passed again; to be called once after each step.

    Steps and epochs follow from the number of the step alone, so that a run that was stopped goes
    on as if it had not been. Minutes are counted from when it was last time, or from the start.
    """

    def __init__(
        self,
        every: Every | None,  # None: never
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._since = clock, clock()
        also = () if every is None else every.also
        self._others = [Due(other, steps_per_epoch, clock) for other in also]
        self._steps = self._seconds = None
        if every is not None and every.unit in _SECONDS:
            self._seconds = every.number * _SECONDS[every.unit]
        elif every is not None:
            # Decimals as they were written: in binary, 0.1 epochs of 30 steps are not quite 3.
            unit = steps_per_epoch if every.unit == "epochs" else 1
            self._steps = Fraction(str(every.number)) * unit

    def __call__(self, done: int) -> bool:
        # Each is called, whatever the others return: minutes are counted from the last time.
        others = [other(done) for other in self._others]
        return self._is_own(done) or any(others)

    def _is_own(self, done: int) -> bool:
        if self._steps is not None:
            return done // self._steps > (done - 1) // self._steps
        if self._seconds is None or self._clock() - self._since < self._seconds:
            return False
        self._since = self._clock()
        return True


def _joined(number: int | float | str, unit: str) -> str:
    return f"{number}{unit}" if unit in _SECONDS else f"{number} {unit}"
