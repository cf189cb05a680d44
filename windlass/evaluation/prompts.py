"""Prompts: of a file, one in a line or in a JSON object of a line; or of the data of a recipe."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.config import listing
from windlass.data import Data
from windlass.data.corpus import under
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.formats import BaseFormat
from windlass.formats.chat import Format as Chats

JSON = (".jsonl", ".ndjson")


def of_data(data: Data) -> Iterator[dict[str, Any]]:
    """The examples of a recipe's data as prompts: texts, or chats without their last answers."""
    for part in data.parts:
        with under(part.key):
            yield from _of_source(part.source, data.format)


def _of_source(source: Any, format: BaseFormat) -> Iterator[dict[str, Any]]:
    is_chat = isinstance(format, Chats)
    if source.yields != "text" or not (is_chat or format.reads == "text"):
        raise UserError("prompts are made of texts and chats, and data.source has neither")
    for number in range(len(source)):
        if not isinstance(format, Chats):
            yield {"prompt": source[number]["text"]}
            continue
        row, where = source.row(number), source.where(number)
        if not number:
            format, _ = format.settled(row, where)
        yield {"messages": _question(format.conversation(row, where))}


def _question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages up to the last of the user's."""
    last = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return messages[: last + 1]


def read(path: str | Path) -> list[dict[str, Any]]:
    """The examples of a file, each with a `prompt`, or with the `messages` of a chat.

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
    if place.suffix not in JSON:
        return [{"prompt": line.rstrip("\r")} for _, line in full]
    return [_row(line, f"{path} line {number}") for number, line in full]


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f'{where} is no JSON object; it must be like {{"prompt": "..."}}')
    if isinstance(row.get("messages"), list) or isinstance(row.get("prompt"), str):
        return row
    has = f"it has {listing(row, 'and')}" if row else "it is empty"
    raise UserError(f"{where} has no prompt that is text and no messages that are a list; {has}")
