"""The JSON schema of a recipe, so that an editor can complete it and explain its keys."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import pydantic

from windlass.config.elsewhere import also
from windlass.config.recipe import KINDS
from windlass.config.sections import Open, default, dotted, fields, holds, written


def json_schema(schema: Any) -> dict[str, Any]:
    """The schema of a whole recipe, `by_device` included."""
    whole = _section(schema, "")
    same = {name: {"$ref": f"#/properties/{name}"} for name in whole["properties"]}
    same.pop("device", None)
    special = {"type": "object", "properties": same, **_closed()}
    whole["properties"]["by_device"] = {
        "description": "overrides on that kind of device only",
        "type": "object",
        "properties": dict.fromkeys(KINDS, special),
        "additionalProperties": False,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _closed() -> dict[str, Any]:
    # A key may be written dotted (`train.batch: 64`) in any mapping, which also means that nothing
    # can be required here: what looks absent may come dotted, by device, or on the command line.
    return {"patternProperties": {r"\.": {}}, "additionalProperties": False}


def _section(schema: Any, key: str) -> dict[str, Any]:
    if getattr(schema, "is_resolved", False):  # nobody types it, so that no editor need know it
        return {"description": inspect.getdoc(schema), "type": "object"}
    notes = comments(schema)
    properties = {}
    for name, (field, annotation) in fields(schema).items():
        full = dotted(key, name)
        entry = _holds(annotation, full)
        text = notes.get(name) or entry.get("description", "")
        if (value := default(field)) is dataclasses.MISSING:
            text = f"{text} (required)".lstrip()
        else:
            entry["default"] = written(annotation, value)
        if text := "; ".join(part for part in (text, also(full)) if part):
            entry["description"] = text
        properties[name] = entry
    described = {"description": inspect.getdoc(schema)} if schema.__doc__ else {}
    return {**described, "type": "object", "properties": properties, **_closed()}


def _holds(annotation: Any, key: str) -> dict[str, Any]:
    slot = holds(annotation)
    choices: list[dict[str, Any]]
    match slot.shape:
        case "section":
            choices = [_section(slot.of, key)]
            if shorthand := getattr(slot.of, "shorthand", None):
                choices.insert(0, _holds(fields(slot.of)[shorthand][1], dotted(key, shorthand)))
        case "open":
            choices = [_one_of(slot.of, name, key) for name in slot.of.names()]
            choices.append({"enum": slot.of.names()})
            if slot.of.instead is not None:  # beside its keys any field of a member may stand
                choices.append(_section(slot.of.instead, key) | {"additionalProperties": True})
        case "several":
            item = _holds(slot.of, key)
            choices = [*item["anyOf"], {"type": "array", "items": item}]
        case "list" | "tuple":
            choices = [{"type": "array", "items": _holds(slot.of, key)}]
        case "mapping":
            choices = [{"type": "object", "additionalProperties": _holds(slot.of, key)}]
        case "spelled":
            choices = [dict(slot.of.schema)]
        case _:
            return pydantic.TypeAdapter(annotation).json_schema()
    if slot.optional:
        choices.append({"type": "null"})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _one_of(choice: Open, name: str, key: str) -> dict[str, Any]:
    member = _section(choice.load(name), key)
    member["properties"] = {choice.tag: {"const": name}, **member["properties"]}
    return member


def comments(schema: Any) -> dict[str, str]:
    """The comment of each field in the source: the one beside it, or else the one just above."""
    notes = {}
    for cls in reversed(schema.__mro__):
        if dataclasses.is_dataclass(cls):
            notes |= _comments_in(cls)
    return notes


def _comments_in(cls: Any) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class typed at a prompt has no source
        return {}
    lines = source.splitlines()
    notes = {}
    for node in ast.parse(source).body[0].body:  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.end_lineno is not None
        # The parser counts columns in bytes.
        rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        comment = [rest]
        if not rest.strip():
            start = node.lineno - 1
            while lines[start - 1].strip().startswith("#"):
                start -= 1
            comment = lines[start : node.lineno - 1]
        if text := " ".join(line.strip().lstrip("# ") for line in comment):
            notes[node.target.id] = text
    return notes
