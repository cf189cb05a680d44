"""Two answers to one prompt, of which one was chosen: what preferences are learned from."""

from typing import Any, ClassVar, Literal

from windlass.config import listing, section
from windlass.errors import UserError
from windlass.formats import Contract, Rendered, Span
from windlass.hub.template import Template, Unrendered

Message = dict[str, Any]
BEGIN, END = "\ue0f0", "\ue0f1"  # for private use: no text has them


@section
class Format(Contract):
    """A prompt with a chosen and a rejected answer, of which the answers alone are compared.

    Each is text, or a list of messages; answers may be whole conversations, which then differ in
    their last message alone. A row makes two documents, the chosen one first.
    """

    together: ClassVar[int] = 2
    columns: ClassVar[tuple[str, ...]] = ("reference",)

    prompt: str = "prompt"  # the columns: not needed where answers are whole conversations
    chosen: str = "chosen"
    rejected: str = "rejected"
    system: str | None = None  # a column with a system message, put before the prompt
    # chat: by the tokenizer's template; text: the answer right behind the prompt. null: chat where
    # there is a template
    style: Literal["chat", "text"] | None = None
    template: str | None = None  # in place of the tokenizer's own: chatml, or a file
    equal: Literal["refuse", "drop"] = "refuse"  # a row whose answers are the same

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        chosen, rejected = self._conversations(row, where)
        if chosen[-1] == rejected[-1]:
            if self.equal == "drop":
                return []
            raise UserError(
                f"{where}: {self.chosen} and {self.rejected} are the same, so that there is "
                "nothing to prefer; data.format.equal=drop leaves such rows out"
            )
        style = self.style or ("text" if template is None else "chat")
        if style == "text":
            return [self._text(messages, where) for messages in (chosen, rejected)]
        if template is None:
            raise UserError(
                "data.format.style is chat, and the tokenizer has no chat template; "
                "data.format.template=chatml would do, or a file with one"
            )
        return [_chat(messages, where, template) for messages in (chosen, rejected)]

    def _conversations(self, row: dict[str, Any], where: str) -> tuple[list[Message], ...]:
        """Both conversations, which differ in their last message alone."""
        missing = [name for name in (self.chosen, self.rejected) if not row.get(name)]
        if missing:
            has = listing([name for name, value in row.items() if value], "and")
            raise UserError(
                f"{where} has no {listing(missing, 'and')}; it has {has or 'nothing'}. "
                "data.format.chosen and data.format.rejected name other columns"
            )
        before = self._prompt(row, where)
        both = [self._answer(row[name], before, name, where) for name in self._answers]
        chosen, rejected = both
        if chosen[:-1] != rejected[:-1]:
            raise UserError(
                f"{where}: {self.chosen} and {self.rejected} do not share a prompt: they are to "
                "differ in their last message alone"
            )
        if len(chosen) == 1:
            raise UserError(
                f"{where} has no {self.prompt}, and its answers are no conversations that begin "
                "with one; data.format.prompt names another column"
            )
        return chosen, rejected

    @property
    def _answers(self) -> tuple[str, str]:
        return self.chosen, self.rejected

    def _prompt(self, row: dict[str, Any], where: str) -> list[Message]:
        prompt = row.get(self.prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        system = row.get(self.system) if self.system else None
        if system:
            messages = [{"role": "system", "content": system}, *(messages or [])]
        return _messages(messages or [], self.prompt, where)

    def _answer(self, answer: Any, before: list[Message], name: str, where: str) -> list[Message]:
        if isinstance(answer, str):
            return [*before, {"role": "assistant", "content": answer}]
        messages = _messages(answer, name, where)
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: {name} does not end with a message of the assistant")
        # A whole conversation has the prompt in it.
        is_whole = any(message["role"] != "assistant" for message in messages)
        if not is_whole:
            return [*before, *messages]
        is_led = before[:1] and before[0]["role"] == "system" and messages[0]["role"] != "system"
        return [*before[:1], *messages] if is_led else messages

    def _text(self, messages: list[Message], where: str) -> Rendered:
        if [message["role"] for message in messages] not in (
            ["user", "assistant"],
            ["system", "user", "assistant"],
        ):
            raise UserError(
                f"{where} is a conversation, and as text there is one prompt and one answer; "
                "data.format.template=chatml writes it as a chat"
            )
        prompt = "".join(message["content"] for message in messages[:-1])
        text = prompt + messages[-1]["content"]
        return Rendered(text, (Span(len(prompt), len(text)),))


def _messages(found: Any, name: str, where: str) -> list[Message]:
    is_right = isinstance(found, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str)
        for one in found
    )
    if not is_right:
        raise UserError(
            f"{where}: {name} is neither text nor a list of messages, each with role and content"
        )
    return found


def _chat(messages: list[Message], where: str, template: Template) -> Rendered:
    """A conversation as its template writes it; the last answer and its stop are compared."""
    answer = messages[-1]["content"]
    inner = answer.strip()
    marked = answer.replace(inner, BEGIN + inner + END, 1)
    try:
        plain = template.render(messages)
        seen = template.render([*messages[:-1], messages[-1] | {"content": marked}])
    except Unrendered as why:
        raise UserError(f"{where}: the chat template refuses this conversation: {why}") from None
    begin, end = seen.find(BEGIN), seen.find(END) - 1
    if not inner or begin < 0 or seen.replace(BEGIN, "").replace(END, "") != plain:
        raise UserError(f"{where}: the chat template does not write the answer as it is")
    stop = template.tokens.search(plain, end)
    if stop is None:
        raise UserError(
            f"{where}: the chat template writes no special token behind the answer, so that a "
            "model would not learn where to stop"
        )
    return Rendered(plain, (Span(begin, end), Span(stop.start(), stop.end())), is_whole=True)
