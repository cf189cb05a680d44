"""Preference pairs: two answers to one prompt, of which one was chosen."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from windlass.columns import LENGTH, Column
from windlass.config import listing, section
from windlass.errors import UserError
from windlass.formats import BaseFormat, Rendered, Span, chat
from windlass.hub.chat_template import Template

Messages = list[dict[str, Any]]


@section
class Format(BaseFormat):
    """A prompt with a chosen and a rejected answer, of which the answers alone are compared.

    Each is text, or a list of messages; answers may be whole conversations, which then differ in
    their last message alone. An example makes two documents, the chosen one first.
    """

    speaks: ClassVar[bool] = True
    together: ClassVar[int] = 2
    unit: ClassVar[str] = "pair"
    columns: ClassVar[Mapping[str, Column]] = {"reference": Column(np.float32, (LENGTH,))}

    # the columns; that of the prompt is not needed where answers are whole conversations
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    system: str | None = None  # the column of a system message, put before the prompt
    # chat: by a chat template; text: the answer right behind the prompt. null: chat where the
    # tokenizer has a template
    style: Literal["chat", "text"] | None = None
    template: str | None = None  # chatml, or a file with a Jinja template; null: the tokenizer's
    # of a reasoning model: off puts an empty thought before the answer, on the answer's own
    thinking: Literal["none", "off", "on"] = "none"

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        missing = [name for name in (self.chosen, self.rejected) if not row.get(name)]
        if missing:
            has = listing([name for name, value in row.items() if value], "and")
            raise UserError(
                f"{where} has no {listing(missing, 'and')}; it has {has or 'nothing'}. "
                "data.format.chosen and data.format.rejected name other columns"
            )
        style = self.style or ("text" if template is None else "chat")
        if style == "chat" and template is None:
            raise UserError(
                "data.format.style is chat, and the tokenizer has no chat template; "
                "data.format.template=chatml would do, or a file with one"
            )
        chosen = self._conversation(row, self.chosen, where)
        rejected = self._conversation(row, self.rejected, where)
        self._check(chosen, rejected, where)
        if style == "text":
            return [self._text(messages, where) for messages in (chosen, rejected)]
        as_chat = chat.Format(messages="messages", turns="last", thinking=self.thinking)
        beside = {name: row[name] for name in (*chat.EXTRA, chat.VARIABLES) if name in row}
        both = [beside | {"messages": messages} for messages in (chosen, rejected)]
        return [one for each in both for one in as_chat.render(each, where, template)]

    def _conversation(self, row: dict[str, Any], name: str, where: str) -> Messages:
        """A prompt and an answer to it, as templates know messages."""
        answer, before = row[name], row.get(self.prompt) or []
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        elif isinstance(answer, dict):
            answer = [answer]
        if isinstance(before, str):
            before = [{"role": "user", "content": before}]
        for column, value in ((name, answer), (self.prompt, before)):
            if not isinstance(value, list):
                raise UserError(f"{where} has neither text nor messages in column {column}")
        # A whole conversation has the prompt in it.
        whole = answer if _has_others(answer) else [*before, *answer]
        if self.system is not None and isinstance(system := row.get(self.system), str) and system:
            whole = [{"role": "system", "content": system}, *whole]
        reader, _ = chat.Format(messages=name).settled({name: whole}, where)
        return reader.conversation({name: whole}, where)

    def _check(self, chosen: Messages, rejected: Messages, where: str) -> None:
        if chosen == rejected:
            raise UserError(
                f"{where} has the same in {self.chosen} and {self.rejected}, so that there is "
                "nothing to prefer; data.checks.offending=drop leaves such examples out"
            )
        if chosen[:-1] != rejected[:-1]:
            raise UserError(
                f"{where} has no prompt that {self.chosen} and {self.rejected} share: they are to "
                "differ in their last message alone"
            )
        if not _has_others(chosen[:-1]):
            raise UserError(
                f"{where} has no {self.prompt}, and its answers are no conversations that begin "
                "with one; data.format.prompt names another column"
            )

    def _text(self, messages: Messages, where: str) -> Rendered:
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles != ["user", "assistant"]:
            raise UserError(
                f"{where} is a conversation, and as text there is one prompt and one answer; "
                "data.format.template=chatml writes it as a chat"
            )
        prompt = "".join(message["content"] for message in messages[:-1])
        text = prompt + messages[-1]["content"]
        return Rendered(text, (Span(len(prompt), len(text)),))


def _has_others(messages: Any) -> bool:
    """Presence of a message that is not the assistant's."""
    roles = [
        message.get("role", message.get("from"))
        for message in messages
        if isinstance(message, dict)
    ]
    names = [role for role in roles if isinstance(role, str)]
    return any(chat.ROLES.get(role) not in (None, "assistant") for role in names)
