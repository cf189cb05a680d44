"""How long something may take at most."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from windlass.config.sections import Spelled

_UNITS = {"min": 1 / 60, "h": 1.0, "d": 24.0}
_NAMES = {
    **dict.fromkeys(("min", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"


@dataclass(frozen=True)
class Within(Spelled):
    """How long a run may take: `90min`, `6h`, `2d`."""

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
