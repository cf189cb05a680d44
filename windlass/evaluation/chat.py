"""A conversation with a model, through the chat template of its tokenizer."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import numpy as np

from windlass.config import listing
from windlass.config.sampling import Sampling
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.generate import Generator as Writer
from windlass.hub.chat_template import Thinking, Unrendered, chat_prompt

Messages = list[dict[str, Any]]
ANSWER = "\ue000"  # no template writes this by itself


class Conversation:
    """Chat history, all of which is sent again with each turn.

    Called with the user's message, it returns the answer, and remembers both. With a `frame`, which
    makes a prompt of a question, each message is a question by itself.
    """

    def __init__(
        self,
        generator: Writer,
        sampling: Sampling,
        *,
        system: str | None = None,
        thinking: str = "none",
        longest: int | None = None,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
        frame: Callable[[str], str] | None = None,
    ):
        self.system, self.turns = None, []
        self._frame = frame
        if system is not None:
            self.instruct(system)
        self.thinking = _thinking(thinking)
        if frame is not None and self.thinking != "none":
            raise UserError(
                f"thinking is {thinking}, and this model was trained on sections under headings, "
                "among which its reasoning may be; leave it out"
            )
        self.tokens = 0  # of the last answer
        self.longest = longest  # context length of the model, in tokens
        self._before = 0  # tokens before the last answer
        self._generator, self._sampling, self._scope = generator, sampling, scope

    def __call__(self, text: str) -> str:
        return "".join(self.stream(text))

    @property
    def messages(self) -> Messages:
        """The conversation as an example of chat data has it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def instruct(self, system: str) -> None:
        """Set the system prompt."""
        if self._frame is not None:
            raise UserError(
                "this model was trained on sections under headings, which have no system prompt; "
                "what it is to know belongs to the question"
            )
        self.system = system

    def stream(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces as they come. One that is not waited for is remembered so far."""
        message = {"role": "user", "content": text}
        prompt = self._prompt(message)
        pieces: list[str] = []
        self.tokens, self._before = 0, len(prompt)
        try:
            with self._scope():
                for piece in self._generator.text(prompt, self._counted(prompt), self._sampling):
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                before = self.turns if self._frame is None else []
                answer = {"role": "assistant", "content": "".join(pieces)}
                self.turns = [*before, message, answer]

    def warning(self) -> str | None:
        """A warning where the last answer went beyond the model's context length."""
        length = self._before + self.tokens
        if self.longest is None or length <= self.longest:
            return None
        what = "this conversation has" if self._frame is None else "question and answer have"
        then = "" if self._frame is not None else ", and /reset clears the conversation"
        return (
            f"{what} {length:,} tokens, and the context length of the model is "
            f"{self.longest:,}; answers get worse from here{then}"
        )

    def reset(self) -> None:
        """Clear the history; the system prompt stays."""
        self.turns = []

    def _prompt(self, message: dict[str, Any]) -> np.ndarray:
        if self._frame is None:
            said = [*self.messages, message]
            return encoded(self._generator.vocabulary, said, self.thinking)
        (prompt,) = self._generator.encoded([self._frame(message["content"])])
        return prompt

    def _counted(self, prompt: np.ndarray) -> Iterator[int]:
        for token in self._generator.tokens(prompt, self._sampling):
            self.tokens += 1
            yield token


def encoded(vocabulary: Vocabulary, messages: Messages, thinking: str = "none") -> np.ndarray:
    """The chat prompt as tokens, up to where the model answers."""
    assert vocabulary.chat is not None
    return vocabulary.read(chat_prompt(messages, vocabulary.chat, _thinking(thinking)))


def ends(vocabulary: Vocabulary) -> frozenset[int]:
    """Stop tokens, with the one that ends an assistant's turn.

    A base model that was taught to chat may end documents with one and turns with another.
    """
    if vocabulary.chat is None:
        return vocabulary.stops
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        after = vocabulary.chat.render(messages).rpartition(ANSWER)[2]
    except Unrendered:
        return vocabulary.stops
    match = vocabulary.chat.tokens.search(after)
    return vocabulary.stops | frozenset(map(int, vocabulary.read(match[0]) if match else ()))


def _thinking(requested: str) -> Thinking:
    for mode in get_args(Thinking):
        if requested == mode:
            return mode
    raise UserError(f"thinking is {requested}; it must be {listing(get_args(Thinking))}")
