"""Limits of a plan: the longest time a run may take, and the most it may cost."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from windlass.config.sections import Spelled, section

_UNITS = {"min": 1 / 60, "h": 1.0, "d": 24.0}
_NAMES = {
    **dict.fromkeys(("min", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"


@dataclass(frozen=True)
class Within(Spelled):
    """A time limit: `90min`, `6h`, `2d`."""

    words: ClassVar[str] = "a time such as 90min, 6h or 2d"
    schema: ClassVar[dict[str, Any]] = {"type": "string"}

    number: float
    unit: str

    @classmethod
    def read(cls, value: Any) -> "Within":
        parts = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]+)\s*", str(value).lower())
        if parts is None or parts[2] not in _NAMES:
            raise ValueError(f"it must be {cls.words}")
        if not float(parts[1]):
            raise ValueError("it must be above 0")
        return cls(float(parts[1]), _NAMES[parts[2]])

    def written(self) -> str:
        return f"{self.number:g}{self.unit}"

    @property
    def hours(self) -> float:
        return self.number * _UNITS[self.unit]


@section
class Limits:
    """Limits of time and money; null: none."""

    budget: float | None = None  # USD
    within: Within | None = None

    def __post_init__(self):
        if wrong := self.wrong():
            raise ValueError(*wrong)

    def wrong(self) -> list[str]:
        """Problems of the values of some fields."""
        if self.budget is None or 0 < self.budget < float("inf"):
            return []
        return [f"budget is {self.budget:g}; it must be above 0, in USD"]

    def __str__(self) -> str:
        parts = [] if self.budget is None else [f"--budget {self.budget:g}"]
        parts += [] if self.within is None else [f"--within {self.within.written()}"]
        return " and ".join(parts)
