"""Reading plain data into sections, or one error that names every problem."""

import difflib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import pydantic

from windlass.config import elsewhere
from windlass.config.elsewhere import OURS, instead, ours
from windlass.config.sections import FORMER, default, dotted, fields, holds, leaves
from windlass.config.text import scalar
from windlass.errors import UserError

T = TypeVar("T")
Problem = tuple[str, str]  # the full key, and what is wrong with it
Check = Callable[[Any], list[Problem]]
LONG = 100  # characters of a word that is compared with others


def read(
    schema: type[T], tree: Any, *, origin: str = "the recipe", checks: Iterable[Check] = ()
) -> T:
    """The section that a tree describes, or a UserError that lists every problem.

    Checks look at what was read as a whole, so they run only when every key is in order.
    """
    instance, problems = attempt(schema, tree)
    problems = problems or run(checks, instance)
    if problems:
        raise UserError(report(problems, origin))
    return instance


def attempt(schema: type[T], tree: Any) -> tuple[T, list[Problem]]:
    """A value and its problems; the value means something only when there are none."""
    reader = _Reader(list(fields(schema)))
    instance = reader.section(schema, tree, "")
    return instance, reader.explained()


def run(checks: Iterable[Check], instance: Any) -> list[Problem]:
    return [problem for check in checks for problem in check(instance)]


def report(problems: list[Problem], origin: str) -> str:
    """Every problem on a line of its own, the keys in one column."""
    problems = list(dict.fromkeys(problems))
    names = [key or "the recipe" for key, _ in problems]
    width = max(len(name) for name in names)
    plural = "s" if len(problems) > 1 else ""
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in zip(names, problems, strict=True)]
    return "\n".join([f"{len(problems)} problem{plural} in {origin}:", *lines])


def listing(words: Iterable[Any], last: str = "or") -> str:
    """`a, b or c`."""
    *front, end = [str(word) for word in words] or ["nothing"]
    return f"{', '.join(front)} {last} {end}" if front else end


def show(value: Any) -> str:
    """A value as one would write it in a recipe, cut short where it is long."""
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
}


def describe(annotation: Any) -> str:
    """A field's allowed values, in words."""
    slot = holds(annotation)
    match slot.shape:
        case "section":
            words = f"a section with {listing(fields(slot.of), 'and')}"
        case "open":
            words = f"a section with {slot.of.tag}: {listing(slot.of.names())}"
        case "several":
            words = f"{describe(slot.of)}; or a list of such"
        case "list" | "tuple":
            words = f"a list, each item {describe(slot.of)}"
        case "mapping":
            words = f"a mapping, each value {describe(slot.of)}"
        case "spelled":
            words = slot.of.words
        case _:
            return listing(_WORDS.get(leaf, str(leaf)) for leaf in leaves(annotation))
    return f"{words}, or null" if slot.optional else words


def closest(word: Any, known: Iterable[str]) -> str | None:
    return _closest(str(word), tuple(known))


@functools.lru_cache(maxsize=8192)  # of each unknown key it is asked several times, and is slow
def _closest(word: str, known: tuple[str, ...]) -> str | None:
    return next(iter(difflib.get_close_matches(word[:LONG], known, n=1)), None)


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an unknown key, with the nearest known one."""
    meant = closest(name, known)
    return f"unknown; did you mean {meant}?" if meant else f"unknown; it can be {listing(known)}"


def offer(word: Any, known: Sequence[str]) -> str:
    """The nearest names, and all there are, for one that is not there."""
    meant = closest(word, known)
    hint = f"did you mean {meant}? " if meant else ""
    return f"{hint}there {'are' if len(known) > 1 else 'is'} {listing(known, 'and')}"


class _Unknown(NamedTuple):
    key: str
    siblings: list[str]

    def meant(self) -> str | None:
        return closest(self.key.rpartition(".")[2], self.siblings)

    def explain(self, sections: list[str], known: list[str]) -> str:
        name = self.key.rpartition(".")[2]
        if key := ours(name, sections, known):
            return f"unknown; here it is {key}"
        if "." not in self.key and (advice := instead(self.key)):
            return f"unknown; {advice}"
        others = [full for full in known if full.rpartition(".")[2] == name]
        if others and not self.meant():
            return f"unknown; did you mean {listing(others)}?"
        return unknown(name, self.siblings)


class _Reader:
    """Walks a tree beside its schema and collects what is wrong with it."""

    def __init__(self, sections: list[str]):
        self.sections = sections
        self.problems: list[Problem | _Unknown] = []
        self.known: list[str] = []  # every full key of the sections that were met

    def explained(self) -> list[Problem]:
        """The problems, now that every key an unknown one could have been is known."""
        return [
            (one.key, one.explain(self.sections, self.known)) if isinstance(one, _Unknown) else one
            for one in self.problems
        ]

    def value(self, annotation: Any, value: Any, key: str) -> Any:
        slot = holds(annotation)
        if value is None and slot.optional:
            return () if slot.shape == "several" else None
        match slot.shape:
            case "section":
                return self.section(slot.of, value, key)
            case "open":
                return self.open(slot.of, value, key)
            case "several":
                return self.several(slot.of, value, key)
            case "list" | "tuple" if isinstance(value, list | tuple):
                items = [self.value(slot.of, item, dotted(key, i)) for i, item in enumerate(value)]
                return tuple(items) if slot.shape == "tuple" else items
            case "mapping" if isinstance(value, dict):
                return {
                    name: self.value(slot.of, x, dotted(key, name)) for name, x in value.items()
                }
            case "spelled":
                return self.spelled(slot.of, value, key)
            case "leaf":
                return self.leaf(annotation, value, key)
        return self.refuse(annotation, value, key)

    def refuse(self, annotation: Any, value: Any, key: str) -> None:
        meant = closest(value, [leaf for leaf in leaves(annotation) if isinstance(leaf, str)])
        hint = f"did you mean {meant}?" if meant else f"it must be {describe(annotation)}"
        hint = elsewhere.value(key, value) or hint
        self.problems.append((key, f"is {show(value)}; {hint}"))

    def section(self, schema: Any, value: Any, key: str) -> Any:
        known = fields(schema)
        shorthand = getattr(schema, "shorthand", None)
        entries = {} if value is None else value if isinstance(value, dict) else {"": value}
        entries = _written_out(entries, shorthand)
        entries.pop(FORMER, None)
        if "" in entries:
            return self.refuse(schema, entries[""], key)
        self.known += [dotted(key, name) for name in known]
        before = len(self.problems)
        strangers = [
            _Unknown(dotted(key, name), list(known)) for name in entries if name not in known
        ]
        self.problems += strangers
        # One mistake is one problem.
        misspelled = {one.meant() for one in strangers}
        renamed = {OURS.get(name) for name in entries}
        values = {}
        for name, (field, annotation) in known.items():
            if name in entries:
                values[name] = self.value(annotation, entries[name], dotted(key, name))
            elif name in misspelled or dotted(key, name) in renamed:
                continue
            elif default(field) is MISSING:
                self.problems.append((dotted(key, name), f"is required: {describe(annotation)}"))
        if len(self.problems) > before:
            return None
        try:
            return schema(**values)
        except ValueError as refused:
            self.problems += [_placed(str(what), key, known) for what in refused.args]

    def open(self, choice: Any, value: Any, key: str) -> Any:
        entries = {} if value is None else value if isinstance(value, dict) else {"": value}
        entries = _written_out(entries, choice.tag)
        name, known = entries.pop(choice.tag, choice.usual), choice.names()
        tag = dotted(key, choice.tag)
        if name is None:
            self.problems.append((tag, f"is required: {listing(known)}"))
        elif name not in known:
            self.problems.append((tag, f"is {show(name)}; {offer(name, known)}"))
        else:
            self.known += [tag, *(dotted(key, name) for name in _fields(choice.instead))]
            schema, former = choice.load(name), entries.pop(FORMER, ())
            known = fields(schema)
            entries = {k: x for k, x in entries.items() if k not in former or k in known}
            return self.section(schema, entries, key)

    def several(self, item: Any, value: Any, key: str) -> tuple:
        if isinstance(value, dict) and isinstance(items := value.get(""), list):
            there = listing(dotted(key, number) for number in range(len(items)))
            what = f"unknown; {key} is a list, of which {there} can be named"
            others = [name for name in value if name not in ("", FORMER)]
            self.problems += [(dotted(key, name), what) for name in others]
            return ()
        if not isinstance(value, list | tuple):
            return (self.value(item, value, key),)
        return tuple(self.value(item, one, dotted(key, i)) for i, one in enumerate(value))

    def spelled(self, kind: Any, value: Any, key: str) -> Any:
        try:
            return kind.read(value)
        except ValueError as refused:
            self.problems.append((key, f"is {show(value)}; {refused}"))

    def leaf(self, annotation: Any, value: Any, key: str) -> Any:
        allowed = leaves(annotation)
        numeric = {int, float, bool}.intersection(allowed) and str not in allowed
        if isinstance(value, str) and numeric and value not in allowed:
            value = scalar(value)  # `3e-4` may come as text: from Python, or in quotes
        # True is an int to Python, and 1 is true to pydantic; to a reader of recipes they differ.
        if isinstance(value, bool) and not {bool, Any}.intersection(allowed):
            return self.refuse(annotation, value, key)
        strict = set(allowed) <= {bool, NoneType}
        try:
            return _adapter(annotation).validate_python(value, strict=strict)
        except pydantic.ValidationError:
            return self.refuse(annotation, value, key)


def _fields(schema: type | None) -> list[str]:
    return [] if schema is None else list(fields(schema))


def _adapter(annotation: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(allow_inf_nan=False))


def _written_out(entries: dict, shorthand: str | None) -> dict:
    """The keys of a section, a bare value among them under its name; the last one wins."""
    out: dict = {}
    for name, value in entries.items():
        name = shorthand if name == "" and shorthand else name
        out.pop(name, None)
        out[name] = value
    return out


def _placed(what: str, key: str, known: Iterable[str]) -> Problem:
    """A section's own refusal, under the key it opens with if that is one of its fields."""
    name, _, rest = what.partition(" ")
    return (dotted(key, name), rest) if name.partition(".")[0] in known else (key, what)
