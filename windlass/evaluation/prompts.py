"""A file of prompts: a prompt in a line, or in a JSON object of a line."""

from pathlib import Path
from typing import Any

from windlass.config import listing
from windlass.errors import UserError
from windlass.files import parse_json

JSON = (".jsonl", ".ndjson")


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
