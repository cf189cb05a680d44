"""A conversation with a model, through the chat template of its tokenizer."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import numpy as np

from windlass.config import listing
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.generate import Generator as Writer
from windlass.evaluation.sampling import Sampling
from windlass.hub.chat_template import Thinking, Unrendered, chat_prompt

Messages = list[dict[str, Any]]
ANSWER = "\ue000"  # no template writes this by itself


class Conversation:
    """What was said so far, all of which is sent again with each turn.

    Called with what the user says, it gives the answer, and remembers both.
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
    ):
        self.system, self.turns = system, []
        self.thinking = _thinking(thinking)
        self.tokens = 0  # of the last answer
        self.longest = longest  # tokens of a conversation that the model has learned to read
        self._before = 0  # tokens before the last answer
        self._generator, self._sampling, self._scope = generator, sampling, scope

    def __call__(self, text: str) -> str:
        return "".join(self.stream(text))

    @property
    def messages(self) -> Messages:
        """The conversation as a row of data has it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def stream(self, text: str) -> Generator[str, None, None]:
        """The answer in pieces as they come. One that is not waited for is remembered so far."""
        asked = {"role": "user", "content": text}
        prompt = encoded(self._generator.vocabulary, [*self.messages, asked], self.thinking)
        pieces: list[str] = []
        self.tokens, self._before = 0, len(prompt)
        try:
            with self._scope():
                for piece in self._generator.text(prompt, self._counted(prompt), self._sampling):
                    pieces.append(piece)
                    yield piece
        finally:
            if pieces:
                self.turns += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def warning(self) -> str | None:
        """That the last answer was beyond what the model has learned to read, where it was."""
        length = self._before + self.tokens
        if self.longest is None or length <= self.longest:
            return None
        return (
            f"this conversation has {length:,} tokens, and the model has learned to read "
            f"{self.longest:,}; answers get worse from here, and /reset forgets what was said"
        )

    def reset(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.turns = []

    def _counted(self, prompt: np.ndarray) -> Iterator[int]:
        for token in self._generator.tokens(prompt, self._sampling):
            self.tokens += 1
            yield token


def encoded(vocabulary: Vocabulary, messages: Messages, thinking: str = "none") -> np.ndarray:
    """What the model reads before it answers."""
    assert vocabulary.chat is not None
    return vocabulary.read(chat_prompt(messages, vocabulary.chat, _thinking(thinking)))


def ends(vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that end a text, with the one that ends an assistant's turn.

    A base model that was taught to chat may end documents with one and turns with another.
    """
    if vocabulary.chat is None:
        return vocabulary.stops
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        after = vocabulary.chat.render(said).rpartition(ANSWER)[2]
    except Unrendered:
        return vocabulary.stops
    found = vocabulary.chat.tokens.search(after)
    return vocabulary.stops | frozenset(map(int, vocabulary.read(found[0]) if found else ()))


def _thinking(asked: str) -> Thinking:
    for known in get_args(Thinking):
        if asked == known:
            return known
    raise UserError(f"thinking is {asked}; it must be {listing(get_args(Thinking))}")
