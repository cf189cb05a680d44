"""Prompts: of a file, one in a line or in a JSON object of a line; or of the data of a recipe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from windlass.data import Data
from windlass.data.corpus import under
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.formats import BaseFormat
from windlass.formats.chat import Format as Chats

JSON = (".jsonl", ".ndjson")


class Example(NamedTuple):
    """Line of a file of prompts: its keys, and its place for messages."""

    row: dict[str, Any]
    where: str


def of_data(data: Data) -> Iterator[dict[str, Any]]:
    """The examples of a recipe's data as prompts: texts, or examples without their answers."""
    for part in data.parts:
        with under(part.key):
            yield from _of_source(part.source, data.format)


def _of_source(source: Any, format: BaseFormat) -> Iterator[dict[str, Any]]:
    is_known = isinstance(format, Chats) or format.asked_columns or format.reads == "text"
    if source.yields != "text" or not is_known:
        raise UserError("prompts are made of texts, chats and sections; data.source has none")
    for number in range(len(source)):
        if format.reads == "text":
            yield {"prompt": source[number]["text"]}
            continue
        row, where = source.row(number), source.where(number)
        if not number:
            format, _ = format.settled(row, where)
        if isinstance(format, Chats):
            yield {"messages": _question(format.conversation(row, where))}
        else:
            yield {"prompt": format.asked(row, where)}


def _question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages up to the last of the user's."""
    last = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return messages[: last + 1]


def read(path: str | Path) -> list[Example]:
    """The examples of a file, each with a `prompt`, `messages` or the columns that a format asks.

    A file that does not end in .jsonl is plain text; its empty lines are no prompts.
    """
    place = Path(path).expanduser()
    try:
        lines = place.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"--file is {path}, which cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start}") from None
    full = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not full:
        raise UserError(f"{path} has no prompts: it is empty")
    is_json = place.suffix in JSON
    places = [f"{path} line {number}" for number, _ in full]
    return [
        Example(_row(line, where) if is_json else {"prompt": line.rstrip("\r")}, where)
        for where, (_, line) in zip(places, full, strict=True)
    ]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f'{where} is no JSON object; it must be like {{"prompt": "..."}}')
    return row
