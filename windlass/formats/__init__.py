"""Formats: from examples to text, and the loss mask over it. A file here is a `data.format`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from windlass.columns import Column
from windlass.config import listing
from windlass.errors import UserError
from windlass.hub.chat_template import Template

# Treatment of a document that is longer than a sequence.
Longer = Literal["split", "cut", "drop"]


class Span(NamedTuple):
    """Span of characters in the loss, from `start` to before `stop`, with their weight."""

    start: int
    stop: int
    weight: float = 1.0


class Rendered(NamedTuple):
    """Document as text, with the loss mask over it; the rest is read alone.

    Plain text gets the beginning and the end that documents have, and what looks like a special
    token in it is text like any other; the end weighs what the last character weighs. A document
    that `is_whole` has its special tokens written out, and nothing is put around it.
    """

    text: str
    spans: tuple[Span, ...]
    is_whole: bool = False
    spelled: str | None = None  # a special token that the example's own words spell out
    warning: str | None = None  # continues "so many rows ..."


class BaseFormat(ABC):
    """A format: from an example to documents, with defaults that most keep."""

    # `text`: documents are trained on as a source has them; `rows`: `render` makes them of rows
    reads: ClassVar[str] = "rows"
    longer: ClassVar[Longer] = "drop"  # what is usual
    together: ClassVar[int] = 1  # documents of an example that stay in one sequence
    unit: ClassVar[str] = "token"  # what losses of its examples are averages over
    columns: ClassVar[Mapping[str, Column]] = {}  # of a batch, beside those of packed sequences
    speaks: ClassVar[bool] = False  # with a template, its model can chat
    template: str | None = None  # in place of the tokenizer's own

    @property
    def asked_columns(self) -> Sequence[str]:
        """Columns that a prompt is made of; none where a prompt is text to continue."""
        return ()

    def asked(self, question: str | dict[str, Any], where: str) -> str:
        """Prompt of a question, or of an example that has one, up to where the model writes."""
        return prompt_text(question, where)

    def settled(self, row: dict[str, Any], where: str) -> "tuple[BaseFormat, str | None]":
        """The format that fits the rows, by the first of them, and a note about that."""
        return self, None

    def after(self, row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
        """An example with what it takes of the one before it, which was made in the same way.

        Before the first one `earlier` is empty.
        """
        return row

    @abstractmethod
    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        """The documents of an example; none where it only lends something to the next."""


def prompt_text(question: str | dict[str, Any], where: str, also: str = "") -> str:
    """Text of a prompt, or of an example that has one; `also` names what else would be one."""
    if isinstance(question, str):
        return question
    if isinstance(prompt := question.get("prompt"), str):
        return prompt
    has = f"it has {listing(question, 'and')}" if question else "it is empty"
    raise UserError(
        f"{where} has no prompt that is text{also} and no messages that are a list; {has}"
    )
