"""A recipe written out for people to edit: each key beside its meaning."""

import dataclasses
import inspect
from collections.abc import Iterator
from textwrap import indent as indent_lines
from textwrap import wrap
from typing import Any

from windlass.config.reading import listing
from windlass.config.schema import comments
from windlass.config.sections import Holds, Open, default, fields, holds, written
from windlass.config.text import write, write_inline

WIDTH = 100  # columns
STEP = "  "  # of indentation


def commented(recipe: dict[str, Any], schema: Any) -> str:
    """A recipe as YAML with the comments of its schema.

    Keys of its sections that it does not set are there as comments, with their defaults.
    """
    annotations = {name: annotation for name, (_, annotation) in fields(schema).items()}
    parts = []
    for name, value in recipe.items():
        lines = list(_entry(name, value, annotations[name], "", "")) if name in annotations else []
        parts.append("\n".join(lines) or write({name: value}).rstrip())
    return "\n\n".join(parts) + "\n"


def _entry(name: str, value: Any, annotation: Any, note: str, indent: str) -> Iterator[str]:
    """A key, its value and its meaning."""
    slot = holds(annotation)
    slot = holds(slot.of) if slot.shape == "several" and isinstance(value, dict) else slot
    members = _members(slot, value) if isinstance(value, dict) else []
    if not members:
        text = f"{name}: {write_inline(value)}"
        if len(indent + text) > WIDTH:
            text = indent_lines(write({name: value}).rstrip(), indent).lstrip()
        yield from _line(text, note, indent)
        return
    yield from _line(f"{name}:", note or _first_line(members[-1]), indent)
    inner = indent + STEP
    if slot.shape == "open" and slot.of.tag in value:
        tag, names = slot.of.tag, slot.of.names()
        which = listing(names) if len(names) > 1 else ""
        yield from _line(f"{tag}: {write_inline(value[tag])}", which, inner)
    known = {key: (member, entry) for member in members for key, entry in fields(member).items()}
    for key, item in value.items():
        if key in known:
            member, (_, of) = known[key]
            yield from _entry(key, item, of, comments(member).get(key, ""), inner)
        elif slot.shape != "open" or key != slot.of.tag:
            yield from _line(f"{key}: {write_inline(item)}", "", inner)
    for key, (field, of) in fields(members[-1]).items():
        if key not in value and holds(of).shape in ("leaf", "spelled"):
            usual = default(field)
            shown = "" if usual is dataclasses.MISSING else f" {write_inline(written(of, usual))}"
            yield from _line(f"# {key}:{shown}", comments(members[-1]).get(key, ""), inner)


def _members(slot: Holds, value: dict[str, Any]) -> list[Any]:
    """The sections that have the keys of a mapping; the last is that of keys left out."""
    if slot.shape == "section":
        return [slot.of]
    if slot.shape != "open":
        return []
    choice: Open = slot.of
    name = value.get(choice.tag) or choice.usual
    instead = [] if choice.instead is None else [choice.instead]
    return [*instead, choice.load(name)] if name in choice.names() else instead


def _line(text: str, note: str, indent: str) -> Iterator[str]:
    """A line with its comment beside it, or above where that is too long."""
    beside = f"{indent}{text}  # {note}" if note else f"{indent}{text}"
    if len(beside) <= WIDTH:
        yield beside
        return
    yield from (f"{indent}# {line}" for line in wrap(note, WIDTH - len(indent) - 2))
    yield f"{indent}{text}"


def _first_line(schema: Any) -> str:
    return (inspect.getdoc(schema) or "").partition("\n")[0].rstrip(".")
