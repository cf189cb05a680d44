"""Conversations, written by a chat template; what the assistant says is trained on."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from windlass.config import listing, section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.formats import BaseFormat, Longer, Rendered, Span
from windlass.hub.assistant_spans import BEFORE_WORDS, Chat, other_prompt, read, shape
from windlass.hub.chat_template import EMPTY_THOUGHT, Template, Unrendered
from windlass.hub.markers import REASONING

# Roles of templates, by their names in data sets.
ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool", "developer")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "ipython"), "tool"),
}
EXTRA = ("tools", "documents")  # columns that templates know
VARIABLES = "chat_template_kwargs"  # the column of more template variables
OURS = ("messages", "template", "prompt", "now", "self")  # variables that it has in other ways


@section
class Format(BaseFormat):
    """Messages as a chat template writes them; the assistant's words and stops are trained on.

    Columns that are not named are recognised by the first example.
    """

    longer: ClassVar[Longer] = "drop"
    speaks: ClassVar[bool] = True

    template: str | None = None  # chatml, or a file with a Jinja template; null: the tokenizer's
    # of a reasoning model: on puts its own reasoning before each last answer, off an empty thought
    # that is not trained on, both makes two documents of an example, all chooses on, off or none by
    # a hash of the example; empty is on, with an empty thought that is trained on where there is no
    # reasoning; none leaves thoughts to the template
    thinking: Literal["none", "empty", "off", "on", "both", "all"] = "none"
    turns: Literal["all", "last"] = "all"  # of the assistant: which of them are trained on
    system: str | None = None  # system prompt of examples that have none
    messages: str | None = None  # the column of a list of messages
    role: str = "role"  # in a message: who speaks
    content: str = "content"  # in a message: what is said
    prompt: str | None = None  # in place of messages: the column of a question, or of messages
    input: str | None = None  # the column of what belongs to the question, where there is any
    completion: str | None = None  # with prompt: the column of the answer
    reasoning: str | None = None  # with thinking on: the column of the thoughts before the answer

    def __post_init__(self):
        if self.messages is not None and self.prompt is not None:
            raise ValueError("messages is given, and prompt too; leave one of them out")
        if (self.prompt is None) != (self.completion is None):
            missing, present = ("prompt", "completion")[:: 1 if self.prompt is None else -1]
            raise ValueError(f"{missing} is missing; {present} needs it")

    def settled(self, row: dict[str, Any], where: str) -> tuple["Format", str | None]:
        """Format with the columns that examples have."""
        if self.messages is not None:
            return self._named(row), None
        if self.prompt is not None:
            return self, None
        if "messages" in row:
            note = "examples look like chats: messages"
            return replace(self, messages="messages")._named(row), note
        if "conversations" in row:
            note = "examples look like ShareGPT: conversations"
            return replace(self, messages="conversations")._named(row), note
        if {"prompt", "completion"} <= set(row):
            note = "examples look like questions and answers: prompt, completion"
            return replace(self, prompt="prompt", completion="completion"), note
        if {"instruction", "output"} <= set(row):
            has = [name for name in ("instruction", "input", "output") if name in row]
            columns = replace(self, prompt="instruction", input="input", completion="output")
            return columns, f"examples look like Alpaca: {', '.join(has)}"
        raise UserError(
            f"{where} has the columns {listing(row, 'and')}, and a chat has messages, "
            "conversations, prompt and completion, or instruction and output; "
            "data.format.messages, or data.format.prompt and completion, name other columns"
        )

    def _named(self, row: dict[str, Any]) -> "Format":
        """Format with the keys of messages as ShareGPT has them, where these do."""
        listed = _listed(row.get(self.messages or ""))
        first = listed[0] if listed and isinstance(listed[0], dict) else {}
        is_other = self.role not in first and {"from", "value"} <= set(first)
        return replace(self, role="from", content="value") if is_other else self

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        if template is None:
            raise UserError(
                "data.format is chat, and the tokenizer has no chat template; data.format.template "
                "names a Jinja file or chatml, and an instruct model has one of its own"
            )
        messages = self.conversation(row, where)
        variables = _variables(row, where)
        ways = {"none": [None], "both": ["off", "on"]}.get(self.thinking, [self.thinking])
        if self.thinking == "all":
            ways = [_hashed(messages)]
        thoughts = self._thoughts(row, messages) if self.thinking != "none" else {}
        if self.thinking == "on" and not thoughts:
            raise UserError(
                f"{where} has no reasoning, and data.format.thinking is on; it stands in an "
                "answer between <think> and </think>, or as reasoning_content, reasoning or "
                "thinking, or in the column that data.format.reasoning names"
            )
        if self.thinking in ("both", "all") and not thoughts and "on" in ways:
            ways = ["off"]
        try:
            chats = [_chat(template, messages, variables, way, thoughts) for way in ways]
        except Unrendered as why:
            raise UserError(f"{where} is no chat that the template can write: {why}") from None
        spelled = next(_spelled(template, messages), None)
        warnings = [_warning(other_prompt(template, chat)) for chat in chats]
        return [
            Rendered(chat.text, self._spans(chat), True, spelled, warning)
            for chat, warning in zip(chats, warnings, strict=True)
        ]

    def _spans(self, chat: Chat) -> tuple[Span, ...]:
        chosen = chat.turns if self.turns == "all" else chat.turns[-1:]
        return tuple(Span(turn.start, turn.stop) for turn in chosen)

    def conversation(self, row: dict[str, Any], where: str) -> list[dict[str, Any]]:
        """Messages of an example as templates know them, up to the last of the assistant's."""
        if self.messages is not None:
            messages = self._listed(row, self.messages, where)
        else:
            assert self.prompt is not None and self.completion is not None
            messages = self._turn(row, self.prompt, "user", where)
            messages += self._turn(row, self.completion, "assistant", where)
        system = row.get("system") or self.system
        if isinstance(system, str) and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system})
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages:
            raise UserError(f"{where} has no turn of the assistant, whose words are trained on")
        return messages

    def _turn(self, row: dict[str, Any], column: str, role: str, where: str) -> list[dict]:
        value = _column(row, column, where)
        if not isinstance(value, str):
            return self._listed(row, column, where)
        more = row.get(self.input) if self.input and role == "user" else None
        text = f"{value}\n\n{more}" if more else value
        return [{"role": role, "content": text}]

    def _listed(self, row: dict[str, Any], column: str, where: str) -> list[dict[str, Any]]:
        turns = _listed(_column(row, column, where))
        if not isinstance(turns, list) or not turns or not all(isinstance(x, dict) for x in turns):
            raise UserError(f"{where} has no list of messages in column {column}")
        return [self._message(one, f"message {n + 1} of {where}") for n, one in enumerate(turns)]

    def _message(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        # Tables give every message the columns of all, with nothing in them.
        message = {name: value for name, value in raw.items() if value is not None}
        for key in (self.role, self.content):
            if key not in message and not (key == self.content and message.get("tool_calls")):
                raise UserError(
                    f"{where} has no {key}; it has {listing(message, 'and')}: data.format.role "
                    "and data.format.content name the keys of who speaks and what is said"
                )
        role, content = message.pop(self.role), message.pop(self.content, "")
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(f"{where} is of {role}; it can be of {listing(ROLES)}")
        message = {"role": ROLES[role], "content": _text(content, where), **message}
        if role == "function_call" and (call := _object(message["content"])) is not None:
            message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        for name in REASONING:
            if name in message:
                message[name] = _text(message[name], where)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                _call(call, where) for call in _objects(calls, "tool_calls", where)
            ]
        return message

    def _thoughts(self, row: dict[str, Any], messages: list[dict[str, Any]]) -> dict[int, str]:
        """Reasoning in front of each answer that follows the last question."""
        thoughts = {}
        for number in _last(messages):
            inside, _ = _split_thought(messages[number]["content"])
            own = [messages[number].get(name) for name in REASONING]
            if number == len(messages) - 1:
                own += [row.get(name) for name in (self.reasoning, *REASONING) if name]
            own = [text.strip() for text in [inside, *own] if isinstance(text, str)]
            if any(own):
                thoughts[number] = next(text for text in own if text)
        return thoughts


def suited_thinking(template: Template) -> tuple[Literal["none", "empty"], str] | None:
    """The `thinking` that trains what the default prompt asks for, and why.

    None where template and prompt write no thoughts by themselves.
    """
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    try:
        chat = read(template, messages)
    except Unrendered:
        return None
    (turn,) = chat.turns
    if other_prompt(template, chat) is not None:
        return "empty", "prompts open a thought: one that is empty is learned, too"
    if turn.words > turn.start:
        return "none", "prompts leave the thought to the model: an empty one is learned, too"
    return None


def _chat(
    template: Template,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    way: str | None,
    thoughts: dict[int, str],
) -> Chat:
    """A conversation as it is, or with a thought before each answer to the last question."""
    if way is None:
        return read(template, messages, **variables)
    last = _last(messages)
    bare = [_bare(one) if number in last else one for number, one in enumerate(messages)]
    asked = {} if way == "empty" else {"enable_thinking": way == "on"}
    chat = read(template, bare, **asked | variables)
    opening = shape(template).opening.rstrip()
    opens, is_closed = (opening.endswith(tag) for tag in ("<think>", "</think>"))
    text, turns, moved = chat.text, [], 0
    for turn in chat.turns:
        turn = turn._replace(start=turn.start + moved, words=turn.words + moved)
        turn = turn._replace(stop=turn.stop + moved)
        if turn.message in last:
            thought = thoughts.get(turn.message) if way != "off" else None
            block = EMPTY_THOUGHT if thought is None else f"<think>\n{thought}\n</think>\n\n"
            tag = BEFORE_WORDS.search(text, 0, turn.words)
            begin = tag.start() if tag else turn.words
            text = text[:begin] + block + text[turn.words :]
            longer = begin + len(block) - turn.words
            start = begin + (len("<think>\n") if opens else 0)
            words = turn.words + longer
            is_given = thought is None and (way != "empty" or is_closed)
            turn = turn._replace(
                start=words if is_given else start, words=words, stop=turn.stop + longer
            )
            moved += longer
        turns.append(turn)
    return Chat(text, tuple(turns))


def _hashed(messages: list[dict[str, Any]]) -> str | None:
    """One of the ways to think, by a hash of a conversation."""
    text = json.dumps(messages, sort_keys=True, default=str)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    return (None, "off", "on")[number % 3]


def _last(messages: list[dict[str, Any]]) -> list[int]:
    """Turns of the assistant behind the last question: only these keep their thoughts."""
    question = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
    return [n for n, one in enumerate(messages) if n > question and one["role"] == "assistant"]


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in message.items() if name not in REASONING}
    return others | {"content": _split_thought(message["content"])[1]}


def _split_thought(content: str) -> tuple[str, str]:
    """Split of a content into the thought that it begins with, and the rest."""
    thought, end, rest = content.partition("</think>")
    return (thought.replace("<think>", "", 1), rest.lstrip("\n")) if end else ("", content)


def _warning(prompts: tuple[str, str] | None) -> str | None:
    """Warning where the last answer is trained behind another prompt than the default one."""
    if prompts is None:
        return None
    default, other = prompts
    if other.rstrip().endswith("</think>"):
        would = "windlass chat --thinking off prompts as these, data.format.thinking=empty trains"
    elif default.rstrip().endswith("</think>"):
        would = "windlass chat --thinking on prompts as these, data.format.thinking=off trains"
    else:
        would = "data.format.thinking=empty trains"
    return (
        f"train answers behind {json.dumps(other, ensure_ascii=False)}, and the default prompt of "
        f"the chat template ends in {json.dumps(default, ensure_ascii=False)}, behind which the "
        f"model learns nothing; {would} what the default asks for"
    )


def _spelled(template: Template, messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        if match := template.tokens.search(message["content"]):
            yield match.group()


def _variables(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Template variables of an example beside its messages."""
    variables = {name: _listed(row[name]) for name in EXTRA if row.get(name)}
    if "tools" in variables:
        _objects(variables["tools"], "tools", where)
    more = row.get(VARIABLES)
    if not isinstance(more, dict):
        return variables
    if wrong := [name for name in OURS if name in more]:
        raise UserError(f"{where} has {wrong[0]} in {VARIABLES}, which no example can set")
    return variables | more


def _objects(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    objects = _listed(value)
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise UserError(f"{where} has {name} that are no list of objects")
    return objects


def _column(row: dict[str, Any], column: str, where: str) -> Any:
    if row.get(column) is None:
        has = "has null in column" if column in row else "has no column"
        raise UserError(f"{where} {has} {column}; its columns are {listing(row, 'and')}")
    return row[column]


def _listed(value: Any) -> Any:
    """Parse a list, which some tables hold as the text of one."""
    if isinstance(value, str):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value


def _object(text: str) -> dict[str, Any] | None:
    value = _listed(text)
    return value if isinstance(value, dict) and "name" in value else None


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call whose arguments are an object, which most templates expect."""
    if call.get("function") is None:  # as tables give it to calls that have a name themselves
        call = {name: value for name, value in call.items() if name != "function"}
    function = call.get("function", call)
    if not isinstance(function, dict) or "function" in function:
        raise UserError(f"{where} has a call whose function is no object with a name")
    function = dict(function)
    arguments = _listed(function.get("arguments"))
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return call | {"function": function} if "function" in call else function


def _text(content: Any, where: str) -> str:
    """Content of a message, its parts as one text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        is_object = isinstance(part, dict)
        if is_object and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            continue
        kind = part.get("type", "object") if is_object else type(part).__name__
        raise UserError(f"{where} holds a part of kind {kind}; text alone can be trained on")
    return "".join(part["text"] for part in parts)
