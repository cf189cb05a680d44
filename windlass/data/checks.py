"""Checks of examples before they are trained on: rules, duplicates, and what was dropped."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from windlass.config import listing, section
from windlass.data.counting import COUNTS, text_of
from windlass.errors import UserError

ANY = "any"  # in `least`: rows of every kind
SHOWN = 3  # offending rows of each rule, in a message
Policy = Literal["refuse", "drop", "warn"]
EMPTY, EXACT, ALIKE, MADE = "empty", "duplicate", "alike", "format"
NOT_WORDS = re.compile(r"[\W_]+")


@section
class Least:
    """The least that a text has of something."""

    words: int | None = None  # what stands between spaces
    characters: int | None = None
    # different cases, such as Smith v Jones or [2023] UKSC 12, and different Acts with their year
    citations: int | None = None
    steps: int | None = None  # different ones written as Step 1:

    def __post_init__(self):
        wrong = [name for name in COUNTS if (getattr(self, name) or 0) < 0]
        if wrong:
            raise ValueError(
                *[f"{name} is {getattr(self, name)}; it is 0 or more" for name in wrong]
            )


@section
class Checks:
    """What is asked of every row, before it is tokenised."""

    # a row that breaks a rule, or of which the format makes nothing: stop and name it, leave it
    # out, or keep it if that is possible and say so
    offending: Policy = "refuse"
    required: tuple[str, ...] = ()  # columns that are there, and not empty
    # the values that a column may have, where it is there
    allowed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by: str | None = None  # the column whose value picks what is asked below
    # the least that a column's text has of something, by the value of that column or for `any`:
    # {basic: {answer: {words: 250, citations: 2}, reasoning: {steps: 4, characters: 200}}}
    least: dict[str, dict[str, Least]] = field(default_factory=dict)
    duplicates: Policy = "warn"  # rows of which the same text is made as of an earlier one
    alike: Policy = "warn"  # the same, but for capitals, spaces and punctuation
    empty: Literal["refuse", "drop"] = "drop"  # rows without any text

    def __post_init__(self):
        if self.by is None and (named := [value for value in self.least if value != ANY]):
            raise ValueError(
                f"least names {', '.join(named)}; by says which column has these values, "
                f"and {ANY} stands for every row"
            )

    def broken(self, row: dict[str, Any]) -> Iterator["Broken"]:
        """Every rule that a row breaks."""
        for name in self.required:
            if not text_of(row.get(name)).strip():
                yield Broken(f"required {name}", f"{name} is {_absence(row, name)}")
        for name, values in self.allowed.items():
            if name in row and text_of(row[name]) not in values:
                may = ", ".join(values)
                yield Broken(f"allowed {name}", f"{name} is {row[name]!s:.40}; it can be {may}")
        kind = None if self.by is None else text_of(row.get(self.by))
        for value in dict.fromkeys((ANY, kind)):
            where = "" if value == ANY else f" where {self.by} is {value}"
            for name, least in self.least.get(value or "", {}).items():
                text = text_of(row.get(name))
                for what, count in COUNTS.items():
                    asked = getattr(least, what)
                    if asked is not None and (found := count(text)) < asked:
                        told = f"{name} has {found:,} {what}; {asked:,} are asked for{where}"
                        yield Broken(f"{name} {what}", told)


class Broken(NamedTuple):
    """A rule that a row breaks, and how."""

    rule: str
    told: str


@dataclass
class Found:
    """What one pass over the rows came to; written beside the tokens, so that it is made once."""

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # rows, by the first rule they break
    told: dict[str, int] = field(default_factory=dict)  # rows that were kept all the same, by rule
    first: dict[str, list[str]] = field(default_factory=dict)  # by rule: where, and how

    def lines(self) -> Iterator[tuple[str, str]]:
        """What there is to say, by name."""
        yield "examples", f"{self.rows:,} read, {self.kept:,} kept"
        for done, counts in (("dropped", self.dropped), ("kept", self.told)):
            for rule, count in counts.items():
                yield "checks", f"{_counted(count, rule)} {done}, the first {self.first[rule][0]}"


class Checker:
    """Looks at rows one after the other, and remembers what it saw."""

    def __init__(self, checks: Checks):
        self.checks, self.found = checks, Found()
        self._refused: dict[str, int] = {}
        self._exact: dict[bytes, str] = {}
        self._alike: dict[bytes, str] = {}

    def takes(self, row: dict[str, Any], where: str) -> bool:
        """Whether a row is to be made into text."""
        self.found.rows += 1
        if all(value is None or not str(value).strip() for value in row.values()):
            return self._judge(self.checks.empty, EMPTY, where, "it has no text")
        broken = list(self.checks.broken(row))
        for rule, told in broken:
            self._note(rule, where, told)
        if broken:
            return self._act(self.checks.offending, broken[0].rule, [one.rule for one in broken])
        return True

    @contextmanager
    def making(self, where: str) -> Iterator[None]:
        """While text is made of a row: where offending rows may stay out, so may one of no use."""
        try:
            yield
        except UserError as refused:
            if self.checks.offending == "refuse":
                raise
            self._judge("drop", MADE, where, str(refused).removeprefix(f"{where} "))

    def keeps(self, texts: Iterable[str], where: str) -> bool:
        """Whether the text that was made of a row is to be trained on."""
        text = "\0".join(texts)
        if not text.strip("\0 \n\t"):
            return self._judge(self.checks.empty, EMPTY, where, "it has no text")
        exact = _digest(text)
        if (first := self._exact.setdefault(exact, where)) != where:
            taken = self._judge(self.checks.duplicates, EXACT, where, f"the same as {first}")
        else:
            plain = _digest(NOT_WORDS.sub(" ", text).strip().casefold())
            taken = True
            if (first := self._alike.setdefault(plain, where)) != where:
                taken = self._judge(self.checks.alike, ALIKE, where, f"nearly the same as {first}")
        # After a refusal nothing is trained on, and what follows is only counted.
        taken = taken and not self._refused
        self.found.kept += taken
        return taken

    def finish(self) -> Found:
        """What was found, or an error where there is a row that must not be there."""
        if self._refused:
            raise UserError(self._refusal())
        if self.found.rows and not self.found.kept:
            rule, told = next(iter(self.found.first.items()))
            raise UserError(
                f"data.checks leave none of the {self.found.rows:,} rows; "
                f"the first to go breaks {rule}: {told[0]}"
            )
        return self.found

    def _judge(self, policy: Policy, rule: str, where: str, told: str) -> bool:
        self._note(rule, where, told)
        return self._act(policy, rule, [rule])

    def _note(self, rule: str, where: str, told: str) -> None:
        first = self.found.first.setdefault(rule, [])
        if len(first) < SHOWN:
            first.append(f"{where}: {told}")

    def _act(self, policy: Policy, rule: str, rules: list[str]) -> bool:
        if policy == "drop":
            self.found.dropped[rule] = self.found.dropped.get(rule, 0) + 1
            return False
        counts = self._refused if policy == "refuse" else self.found.told
        for each in rules:
            counts[each] = counts.get(each, 0) + 1
        return policy == "warn"

    def _refusal(self) -> str:
        lines = [f"rows of data.source break data.checks, {self.found.rows:,} were looked at:"]
        for rule, count in self._refused.items():
            lines.append(f"  {rule}: {count:,} {'row' if count == 1 else 'rows'}")
            lines += [f"    {told}" for told in self.found.first[rule]]
            if count > SHOWN:
                lines.append(f"    and {count - SHOWN:,} more")
        keys = {EMPTY: "empty", EXACT: "duplicates", ALIKE: "alike"}
        named = dict.fromkeys(keys.get(rule, "offending") for rule in self._refused)
        ways = listing((f"data.checks.{key}=drop" for key in named), "and")
        return "\n".join([*lines, f"{ways} {'leaves' if len(named) == 1 else 'leave'} them out"])


def _counted(count: int, rule: str) -> str:
    """`14 duplicate examples`, `1 example that breaks required answer`."""
    named = {EMPTY: "empty", EXACT: "duplicate", ALIKE: "near-duplicate"}
    noun = "example" if count == 1 else "examples"
    if rule in named:
        return f"{count:,} {named[rule]} {noun}"
    return f"{count:,} {noun} that break{'s' * (count == 1)} {rule}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _absence(row: dict[str, Any], name: str) -> str:
    return "empty" if name in row else "missing"
