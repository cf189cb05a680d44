"""Assistant spans of a rendered chat, whatever template rendered it.

The conversation is rendered twice, plain and with a mark before and behind each piece of what the
assistant says. Without its marks the second must be the first, and then the marks show where the
pieces stand in it. What a template leaves out, such as earlier thoughts, leaves no mark.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from windlass.hub.chat_template import Template, Unrendered
from windlass.hub.markers import REASONING, Marks, Places

BEFORE_WORDS = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
# What ends a turn that calls a tool, where it is not what ends an answer.
CALLED = ("<|eom_id|>", "<|call|>")


class Turn(NamedTuple):
    """A turn of the assistant, in characters of the text."""

    message: int  # its number in the conversation, from 0
    start: int  # of what the model writes
    words: int  # where an answer or a call begins, behind any thought
    stop: int  # behind the special token that ends it


class Chat(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    turns: tuple[Turn, ...]


class Shape(NamedTuple):
    """Frame that a template puts around an answer."""

    opening: str  # what a prompt ends in
    ends: frozenset[str]  # special tokens that end a turn


def read(template: Template, messages: list[dict[str, Any]], **variables: Any) -> Chat:
    """A conversation with its turns, or `Unrendered` with the reason why there is none."""
    messages = [_aliased(message) for message in messages]
    try:
        return _read(template, messages, variables)
    except Unrendered:
        # Some templates write the arguments of a call as they are, and need them as text.
        texts = [_with_text_arguments(message) for message in messages]
        if texts == messages:
            raise
        return _read(template, texts, variables)


@lru_cache(maxsize=8)
def shape(template: Template) -> Shape:
    """Frame of a template, measured on a conversation of one question and one answer."""
    question, answer = ({"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"})
    ends = {template.variables.get("eos_token"), *CALLED} & set(template.special)
    try:
        prompt = template.render([question], prompt=True)
        opening = _suffix(template, template.render([question]), prompt)
        text = template.render([question, answer])
    except Unrendered:
        return Shape("", frozenset(ends))
    last = template.tokens.search(text, text.rfind("4") + 1)
    if last is not None and last.group() not in opening:
        ends.add(last.group())
    return Shape(opening, frozenset(ends))


def _suffix(template: Template, before: str, after: str) -> str:
    """Suffix of a text beyond another, which may end in special tokens of its own."""
    if after.startswith(before):
        return after[len(before) :]
    cut = re.compile(f"({template.tokens.pattern})")
    parts, others = cut.split(after), cut.split(before)
    same = 0
    while same < min(len(parts), len(others)) and parts[same] == others[same]:
        same += 1
    return "".join(parts[same:])


def _read(template: Template, messages: list[dict[str, Any]], variables: dict[str, Any]) -> Chat:
    text = template.render(messages, **variables)
    for how in ("names", "arguments"):
        marks = Marks(text)
        rendered = template.render(marks.messages(messages, how), **variables)
        places = marks.places(rendered)
        if places is not None and places.text == text:
            return Chat(text, tuple(_turns(template, messages, places)))
        if not any(message.get("tool_calls") for message in messages):
            break
    raise Unrendered(
        "it treats the assistant's words in a way that hides where they are in its text"
    )


def _turns(template: Template, messages: list[dict], places: Places) -> Iterator[Turn]:
    text, known = places.text, shape(template)
    numbers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    for number in numbers:
        if number not in places.pieces:
            raise Unrendered(
                f"message {number + 1}, of the assistant, is "
                + ("left out by it" if _has_content(messages[number]) else "empty")
            )
    before = 0
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        pieces = sorted(places.pieces[number])
        first, last = pieces[0][0], max(stop for _, stop, _ in pieces)
        limit = len(text) if following is None else min(places.pieces[following])[0]
        start = _start(text, before, first, pieces[0][2], known.opening)
        words = next((at for at, _, kind in pieces if kind != "thought"), start)
        is_call = any(kind == "call" for _, _, kind in pieces)
        stop = _stop(template, text, last, limit, is_call)
        if stop is None:
            raise Unrendered(
                f"behind message {number + 1}, of the assistant, it writes no special token, so "
                "that a model would not learn where to stop"
            )
        yield Turn(number, start, start if words == first else words, stop)
        before = stop


def _start(text: str, before: int, first: int, kind: str, opening: str) -> int:
    """Start of what a model writes, which may be in front of the first piece.

    Between the words that open a turn and the first piece may stand a tag, the name of a channel,
    the frame of a call. An empty thought in front of an answer is not the assistant's.
    """
    for begin in (opening, BEFORE_WORDS.sub("", opening)):
        at = text.rfind(begin, before, first) if begin else -1
        if at >= 0:
            between = text[at + len(begin) : first]
            is_ours = kind != "words" or not BEFORE_WORDS.search(between)
            return at + len(begin) if between.strip() and is_ours else first
    tag = BEFORE_WORDS.search(text, before, first)
    return tag.start() if tag and kind == "thought" else first


def _stop(template: Template, text: str, last: int, limit: int, is_call: bool) -> int | None:
    """End of a turn, behind its special token: the first one but for those within a call."""
    known = shape(template)
    tokens = [one for one in template.tokens.finditer(text, last, limit)]
    tokens = [one for one in tokens if one.group() not in known.opening]
    if is_call:
        ends = [one for one in tokens if one.group() in known.ends] or tokens
        return ends[0].end() if ends else None
    if not tokens or text[last : tokens[0].start()].strip():
        return None
    return tokens[0].end()


def _has_content(message: dict[str, Any]) -> bool:
    values = [message.get(name) for name in ("content", "tool_calls", *REASONING)]
    return any(value and (not isinstance(value, str) or value.strip()) for value in values)


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Message with its reasoning under every name that templates look for, as in `transformers`."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    def texts(call: dict[str, Any]) -> dict[str, Any]:
        if "function" in call:
            return call | {"function": texts(call["function"])}
        if not isinstance(call.get("arguments"), dict):
            return call
        return call | {"arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    if not message.get("tool_calls"):
        return message
    return message | {"tool_calls": [texts(call) for call in message["tool_calls"]]}
