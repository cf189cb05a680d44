"""Schema of a price file."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from windlass.config import Problem, section
from windlass.config.reading import attempt, offer, report
from windlass.config.sections import Spelled
from windlass.config.text import parse
from windlass.devices import chips
from windlass.errors import UserError

DEAREST = 50.0  # USD: above it stands what a catalogue has in place of a price


@dataclass(frozen=True)
class Day(Spelled):
    """A day."""

    words: ClassVar[str] = "a day, such as 2026-08-22"
    schema: ClassVar[dict[str, Any]] = {"type": "string", "format": "date"}

    text: str

    @classmethod
    def read(cls, value: Any) -> "Day":
        try:
            age = days(value)
        except (TypeError, ValueError):
            raise ValueError(f"it must be {cls.words}") from None
        if age < -1:  # a day begins elsewhere before it does here
            raise ValueError("it must not be in the future")
        return cls(value)

    def written(self) -> str:
        return self.text


@dataclass(frozen=True)
class Known(Spelled):
    """The name of a chip of the catalogue."""

    words: ClassVar[str] = "the name of a chip, such as v5e or h100"
    schema: ClassVar[dict[str, Any]] = {"type": "string"}

    text: str

    @classmethod
    def read(cls, value: Any) -> "Known":
        if value not in names():
            raise ValueError(offer(value, names()))
        return cls(value)

    def written(self) -> str:
        return self.text


@dataclass(frozen=True)
class Dollars(Spelled):
    """USD per chip-hour."""

    words: ClassVar[str] = f"USD per chip-hour, above 0 and at most {DEAREST:g}"
    schema: ClassVar[dict[str, Any]] = {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": DEAREST,
    }

    number: float

    @classmethod
    def read(cls, value: Any) -> "Dollars":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= DEAREST:
            raise ValueError(f"it must be {cls.words}; one that is not known is left out")
        return cls(float(value))

    def written(self) -> float:
        return self.number


@section
class Row:
    """Price of a chip at a provider."""

    chip: Known
    provider: str
    region: str | None = None
    on_demand: Dollars | None = None
    spot: Dollars | None = None
    pods: bool = False
    date: Day | None = None
    note: str | None = None

    def __post_init__(self):
        if self.on_demand is None and self.spot is None:
            raise ValueError("has neither on_demand nor spot")


@section
class Listed:
    """Contents of a price file."""

    date: Day
    sources: list[str]
    prices: list[Row]

    def __post_init__(self):
        if not self.prices:
            raise ValueError("prices is empty")


def read(file: Path) -> Listed:
    """Parse a price file, or raise one error that lists every problem."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not text") from None
    tree, problems = parse(text, str(file))
    if not isinstance(tree, dict):
        raise UserError(f"{file} is no price file: these have date, sources and prices")
    contents, more = attempt(Listed, tree)
    problems += more or list(_duplicates(contents.prices))
    if problems:
        raise UserError(report(problems, str(file)))
    return contents


def names() -> list[str]:
    """Slugs of the chips that can have a price."""
    return [chip.slug for chip in chips.every()]


def days(date: str, today: datetime.date | None = None) -> int:
    """Age of a date, in days."""
    return ((today or datetime.date.today()) - datetime.date.fromisoformat(date)).days


def _duplicates(prices: Sequence[Row]) -> Iterator[Problem]:
    first: dict[tuple, int] = {}
    for number, row in enumerate(prices):
        at = first.setdefault((row.chip, row.provider, row.region, row.pods), number)
        if at != number:
            yield f"prices.{number}", f"has the same chip and place as prices.{at}"
