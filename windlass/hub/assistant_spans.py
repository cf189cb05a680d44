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
# Behind an opening, which may have opened the thought itself; blanks behind it are an answer's.
EMPTY_THOUGHT = re.compile(r"\s*(?:<think>)?\s*</think>\n*")
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

    opening: str  # what a prompt ends in, beyond the conversation
    behind: str  # where that is nothing: what stands behind the question
    ends: frozenset[str]  # special tokens that end a turn


def read(template: Template, messages: list[dict[str, Any]], **variables: Any) -> Chat:
    """A conversation with its turns, or `Unrendered` with the reason why there is none."""
    messages = [_aliased(message) for message in messages]
    try:
        text = template.render(messages, **variables)
    except Unrendered:
        # Some templates write the arguments of a call as they are, and need them as text.
        texts = [_with_text_arguments(message) for message in messages]
        if texts == messages:
            raise
        messages, text = texts, template.render(texts, **variables)
    places = _places(template, messages, text, variables)
    return Chat(text, tuple(_turns(template, messages, places)))


def other_prompt(template: Template, chat: Chat) -> tuple[str, str] | None:
    """Ends of the default prompt, and of what the last answer is trained behind.

    None where they are the same; thoughts apart, templates may open a turn in other ways.
    """
    opening = shape(template).opening
    before = chat.text[: chat.turns[-1].start]
    bare, bare_before = (BEFORE_WORDS.sub("", text) for text in (opening, before))
    if not bare or before.endswith(opening) or not bare_before.endswith(bare):
        return None
    return opening, bare + before[len(bare_before) :]


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
        return Shape("", "", frozenset(ends))
    last = template.tokens.search(text, text.rfind("4") + 1)
    if last is not None and last.group() not in opening:
        ends.add(last.group())
    behind = "" if opening else prompt.rpartition("2 + 2")[2]
    return Shape(opening, behind, frozenset(ends))


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


def _places(
    template: Template, messages: list[dict[str, Any]], text: str, variables: dict[str, Any]
) -> Places:
    """Places of what the assistant says, by marks around names or arguments of its calls."""
    why = "it treats the assistant's words in a way that hides where they are in its text"
    for how in ("names", "arguments"):
        marks = Marks(text)
        try:
            places = marks.places(template.render(marks.messages(messages, how), **variables))
        except Unrendered:  # of a marked name, such as one that is not among the tools
            places = None
        if places is not None and places.text == text:
            hidden = _hidden_call(template, messages, places, variables)
            if hidden is None:
                return places
            why = (
                f"it writes the calls of message {hidden + 1}, of the assistant, in a way that "
                "hides where they are in its text"
            )
        if not any(message.get("tool_calls") for message in messages):
            break
    raise Unrendered(why)


def _hidden_call(
    template: Template, messages: list[dict[str, Any]], places: Places, variables: dict[str, Any]
) -> int | None:
    """The first message whose calls the template writes, and that have no place."""
    for number, message in enumerate(messages):
        pieces = places.pieces.get(number, [])
        is_caller = message["role"] == "assistant" and message.get("tool_calls")
        if not is_caller or any(kind == "call" for _, _, kind in pieces):
            continue
        silent = {name: value for name, value in message.items() if name != "tool_calls"}
        try:
            others = [*messages[:number], silent, *messages[number + 1 :]]
            if template.render(others, **variables) != places.text:
                return number
        except Unrendered:
            return number
    return None


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
        start = _start(text, before, first, pieces[0][2], known)
        words = next((at for at, _, kind in pieces if kind != "thought"), start)
        if words == first:
            empty = EMPTY_THOUGHT.match(text, start, first)
            words = empty.end() if empty else start
        is_call = any(kind == "call" for _, _, kind in pieces)
        stop = _stop(template, text, last, limit, is_call)
        if stop is None:
            raise Unrendered(
                f"behind message {number + 1}, of the assistant, it writes no special token, so "
                "that a model would not learn where to stop"
            )
        yield Turn(number, start, words, stop)
        before = stop


def _start(text: str, before: int, first: int, kind: str, known: Shape) -> int:
    """Start of what a model writes, right behind what a prompt ends in.

    Between that and the first piece may stand blanks, an empty thought, a tag, the name of a
    channel, the frame of a call: the model that was prompted so has to write all of it.
    """
    for begin in (known.opening, BEFORE_WORDS.sub("", known.opening)):
        at = text.rfind(begin, before, first) if begin else -1
        if at >= 0:
            return at + len(begin)
    at = text.rfind(known.behind, before, first) if known.behind else -1
    if at >= 0 and not BEFORE_WORDS.sub("", text[at + len(known.behind) : first]).strip():
        return at + len(known.behind)
    tag = BEFORE_WORDS.search(text, before, first)
    return tag.start() if tag and kind == "thought" else first


def _stop(template: Template, text: str, last: int, limit: int, is_call: bool) -> int | None:
    """End of a turn, behind its special token: the first one but for those within a call.

    Where the end of documents stands right behind it, the model is to write that too.
    """
    known = shape(template)
    tokens = [one for one in template.tokens.finditer(text, last, limit)]
    tokens = [one for one in tokens if one.group() not in known.opening]
    if is_call:
        ends = [one for one in tokens if one.group() in known.ends] or tokens
        return ends[0].end() if ends else None
    if not tokens or text[last : tokens[0].start()].strip():
        return None
    stop, eos = tokens[0].end(), template.variables.get("eos_token")
    for token in tokens[1:]:
        if token.start() != stop:
            break
        stop = token.end()
        if token.group() == eos:
            return stop
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
