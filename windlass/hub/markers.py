"""Markers around what the assistant says, by which it is found again in a rendered chat."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple

REASONING = ("reasoning_content", "thinking", "reasoning")
THOUGHT = re.compile(r"(</?think>)")
# Two planes of characters that mean nothing; those that the text itself has are left out.
PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class AssistantPart(NamedTuple):
    """Piece of what the assistant says, by the mark in front of it."""

    close: str
    message: int
    kind: Literal["thought", "words", "call"]


class Places(NamedTuple):
    """Rendered text, and the places of each message's pieces in it."""

    text: str
    pieces: dict[int, list[tuple[int, int, str]]]  # by message: from, to, kind


class Marks:
    """Markers put around pieces, and found again."""

    def __init__(self, text: str):
        used = set(re.findall("[\U000f0000-\U0010ffff]", text))
        self._free = (chr(x) for x in chain(*PRIVATE) if chr(x) not in used)
        self._pieces: dict[str, AssistantPart] = {}

    def messages(self, messages: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
        return [
            self._message(message, number, how) if message["role"] == "assistant" else message
            for number, message in enumerate(messages)
        ]

    def _message(self, message: dict[str, Any], number: int, how: str) -> dict[str, Any]:
        marked = dict(message)
        thoughts = {message[name]: None for name in REASONING if message.get(name)}
        for thought in thoughts:
            around = self._around(thought, number, "thought")
            marked |= {name: around for name in REASONING if message.get(name) == thought}
        if message.get("content"):
            marked["content"] = "".join(self._content(message["content"], number))
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(x, number, how) for x in message["tool_calls"]]
        return marked

    def _content(self, content: str, number: int) -> Iterator[str]:
        parts = THOUGHT.split(content)
        for place, part in enumerate(parts):
            is_thought = parts[place + 1 : place + 2] == ["</think>"]
            is_tag = place % 2 == 1
            yield (
                part if is_tag else self._around(part, number, "thought" if is_thought else "words")
            )

    def _call(self, call: dict[str, Any], number: int, how: str) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": self._call(call["function"], number, how)}
        if how == "names" and isinstance(call.get("name"), str):
            return call | {"name": self._around(call["name"], number, "call")}
        return call | {"arguments": self._leaves(call.get("arguments"), number)}

    def _leaves(self, value: Any, number: int) -> Any:
        if isinstance(value, str):
            return self._around(value, number, "call")
        if isinstance(value, list):
            return [self._leaves(item, number) for item in value]
        if isinstance(value, dict):
            return {name: self._leaves(item, number) for name, item in value.items()}
        return value

    def _around(self, text: str, number: int, kind: Any) -> str:
        inner = text.strip()
        if not inner:
            return text
        begin, close = next(self._free), next(self._free)
        self._pieces[begin] = AssistantPart(close, number, kind)
        at = text.index(inner)
        return f"{text[:at]}{begin}{inner}{close}{text[at + len(inner) :]}"

    def places(self, rendered: str) -> Places | None:
        """The text without marks, and its pieces; None where one is there twice or in part.

        The name of a function may stand again in front of its result: the first is the call.
        """
        closes = {piece.close for piece in self._pieces.values()}
        marks = "".join([*self._pieces, *closes])
        parts = re.split(f"([{marks}])", rendered) if marks else [rendered]
        text, length, opened = [], 0, {}
        pieces: dict[int, list[tuple[int, int, str]]] = {}
        seen: set[str] = set()
        for part in parts:
            if part in self._pieces:
                if part in seen and self._pieces[part].kind != "call":
                    return None
                seen.add(part)
                opened[self._pieces[part].close] = (self._pieces[part], length)
            elif part in closes:
                if part not in opened:
                    return None
                piece, start = opened.pop(part)
                if part not in seen:
                    pieces.setdefault(piece.message, []).append((start, length, piece.kind))
                seen.add(part)
            else:
                text.append(part)
                length += len(part)
        return None if opened else Places("".join(text), pieces)
