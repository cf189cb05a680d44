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

ANY = "any"  # in `least`: examples of every kind
SHOWN = 3  # offending examples of each rule, in a message
KINDS = 8  # of examples that cannot be read or made into text, in a message: the first of each
HOPELESS = 1000  # examples of which none can be used: the settings are at fault, and not these
Policy = Literal["refuse", "drop", "warn"]
EMPTY, EXACT, ALIKE, MADE = "empty", "duplicate", "alike", "format"
NOT_WORDS = re.compile(r"[\W_]+")
# In a message, what differs from one example to the next: numbers, and what is quoted.
VALUES = re.compile(r"""\d[\d,.]*|"[^"]*"|'[^']*'|`[^`]*`""")


@section
class Least:
    """Minimum counts of a text."""

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
    """Checks of every example, before it is tokenised."""

    # an example that breaks a rule, cannot be read, or of which the format makes nothing: stop and
    # name it, drop it, or keep it if that is possible and report it
    offending: Policy = "refuse"
    required: tuple[str, ...] = ()  # columns that are present, and not empty
    # the values that a column may have, where it is present
    allowed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by: str | None = None  # the column whose value selects a minimum below
    # minimum counts of a column's text, by the value of the column in `by` or for `any`:
    # {basic: {answer: {words: 250, citations: 2}, reasoning: {steps: 4, characters: 200}}}
    least: dict[str, dict[str, Least]] = field(default_factory=dict)
    duplicates: Policy = "warn"  # examples that become the same text as an earlier one
    alike: Policy = "warn"  # near-duplicates: the same but for case, spaces and punctuation
    empty: Literal["refuse", "drop"] = "drop"  # examples without any text

    def __post_init__(self):
        if self.by is None and (named := [value for value in self.least if value != ANY]):
            raise ValueError(
                f"least names {', '.join(named)}; by says which column has these values, "
                f"and {ANY} stands for every example"
            )

    def broken(self, row: dict[str, Any]) -> Iterator["Broken"]:
        """Every rule that an example breaks."""
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
                    minimum = getattr(least, what)
                    if minimum is not None and (actual := count(text)) < minimum:
                        message = f"{name} has {actual:,} {what}; the minimum is {minimum:,}{where}"
                        yield Broken(f"{name} {what}", message)


class Broken(NamedTuple):
    """A rule that an example breaks, and how."""

    rule: str
    message: str


@dataclass
class Found:
    """Counts of one pass over the examples; written beside the tokens, so that it is made once."""

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # examples, by the first rule they break
    told: dict[str, int] = field(default_factory=dict)  # examples kept all the same, by rule
    first: dict[str, list[str]] = field(default_factory=dict)  # by rule: where, and how

    def lines(self, kept: int | None = None) -> Iterator[tuple[str, str]]:
        """Lines of the report, by name; `kept` are those that are in a row, where that is known."""
        yield "examples", f"{self.rows:,} read, {self.kept if kept is None else kept:,} kept"
        for done, counts in (("dropped", self.dropped), ("kept", self.told)):
            for rule, count in counts.items():
                yield "checks", f"{_counted(count, rule)} {done}, the first {self.first[rule][0]}"


class Checker:
    """Checks examples one after the other, and remembers their hashes to find duplicates."""

    def __init__(self, checks: Checks):
        self.checks, self.report = checks, Found()
        self._refused: dict[str, int] = {}
        self._examples = 0  # that are refused
        self._kinds: set[str] = set()  # of messages about examples of no use
        self._first = ""  # of these messages
        self._exact: dict[bytes, str] = {}
        self._alike: dict[bytes, str] = {}

    def takes(self, row: dict[str, Any], where: str) -> bool:
        """Test that an example is to be made into text."""
        self.report.rows += 1
        if all(value is None or not str(value).strip() for value in row.values()):
            return self._judge(self.checks.empty, EMPTY, where, "it has no text")
        broken = list(self.checks.broken(row))
        for rule, message in broken:
            self._note(rule, where, message)
        if broken:
            return self._act(self.checks.offending, broken[0].rule, [one.rule for one in broken])
        return True

    @contextmanager
    def making(self, where: str, *, counts: bool = False) -> Iterator[None]:
        """Guard of reading and rendering: an example of no use is counted, or dropped.

        It `counts` as checked where nothing else has counted it before.
        """
        try:
            yield
        except UserError as refused:
            message = str(refused).removeprefix(f"{where} ")
            if message == str(refused):  # not of this example, but of all
                raise
            self.report.rows += counts
            self._note(MADE, where, message)
            self._act("refuse" if self.checks.offending == "refuse" else "drop", MADE, [MADE])
            self._first = self._first or str(refused)
            if self._examples == self.report.rows == HOPELESS:
                raise UserError(self._first) from None

    def keeps(self, texts: Iterable[str], where: str) -> bool:
        """Test that the text that was made of an example is to be trained on."""
        text = "\0".join(texts)
        if not text.strip("\0 \n\t"):
            return self._judge(self.checks.empty, EMPTY, where, "it has no text")
        exact = _digest(text)
        if (first := self._exact.setdefault(exact, where)) != where:
            keep = self._judge(self.checks.duplicates, EXACT, where, f"the same as {first}")
        else:
            plain = _digest(NOT_WORDS.sub(" ", text).strip().casefold())
            keep = True
            if (first := self._alike.setdefault(plain, where)) != where:
                keep = self._judge(self.checks.alike, ALIKE, where, f"nearly the same as {first}")
        # After a refusal nothing is trained on, and what follows is only counted.
        keep = keep and not self._refused
        self.report.kept += keep
        return keep

    def finish(self) -> Found:
        """The report, or an error where an example must not be there."""
        self.finish_reading()
        if self.report.rows and not self.report.kept:
            rule, messages = next(iter(self.report.first.items()))
            raise UserError(
                f"data.checks leave none of the {self.report.rows:,} examples; "
                f"the first to go breaks {rule}: {messages[0]}"
            )
        return self.report

    def finish_reading(self) -> None:
        """Refuse examples that must not be there."""
        if self._refused:
            raise UserError(self._refusal())

    def _judge(self, policy: Policy, rule: str, where: str, message: str) -> bool:
        self._note(rule, where, message)
        return self._act(policy, rule, [rule])

    def _note(self, rule: str, where: str, message: str) -> None:
        first, is_new = self.report.first.setdefault(rule, []), True
        if rule == MADE:
            kind = VALUES.sub("", message)
            is_new = kind not in self._kinds
            self._kinds.add(kind)
        if is_new and len(first) < (KINDS if rule == MADE else SHOWN):
            first.append(f"{where}{'' if rule == MADE else ':'} {message}")

    def _act(self, policy: Policy, rule: str, rules: list[str]) -> bool:
        if policy == "drop":
            self.report.dropped[rule] = self.report.dropped.get(rule, 0) + 1
            return False
        self._examples += policy == "refuse"
        counts = self._refused if policy == "refuse" else self.report.told
        for each in rules:
            counts[each] = counts.get(each, 0) + 1
        return policy == "warn"

    def _refusal(self) -> str:
        rows = self.report.rows
        if [*self._refused] == [MADE] and self._examples == rows and len(self._kinds) == 1:
            return self._first  # all are alike
        lines = [f"{self._examples:,} of {rows:,} examples of data.source cannot be trained on:"]
        for rule, count in self._refused.items():
            lines.append(f"  {rule}: {count:,} {'example' if count == 1 else 'examples'}")
            first = self.report.first[rule]
            lines += [f"    {message}" for message in first]
            if count > len(first):
                more = ", the first of each kind is named" if rule == MADE else ""
                lines.append(f"    and {count - len(first):,} more{more}")
        keys = {EMPTY: "empty", EXACT: "duplicates", ALIKE: "alike"}
        policies = dict.fromkeys(keys.get(rule, "offending") for rule in self._refused)
        ways = listing((f"data.checks.{key}=drop" for key in policies), "and")
        if self._examples < rows:
            lines.append(f"{ways} {'leaves' if len(policies) == 1 else 'leave'} them out")
        return "\n".join(lines)


def _counted(count: int, rule: str) -> str:
    """`14 duplicate examples`, `1 example that breaks required answer`."""
    adjectives = {EMPTY: "empty", EXACT: "duplicate", ALIKE: "near-duplicate"}
    noun = "example" if count == 1 else "examples"
    if rule in adjectives:
        return f"{count:,} {adjectives[rule]} {noun}"
    return f"{count:,} {noun} that break{'s' * (count == 1)} {rule}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _absence(row: dict[str, Any], name: str) -> str:
    return "empty" if name in row else "missing"
