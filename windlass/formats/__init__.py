"""Formats: from examples to text, and the loss mask over it. A file here is a `data.format`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from windlass.columns import Column
from windlass.hub.chat_template import Template

# What becomes of a document that is longer than a row.
Longer = Literal["split", "cut", "drop"]


class Span(NamedTuple):
    """Characters that are trained on, from `start` to before `stop`, and how much they weigh."""

    start: int
    stop: int
    weight: float = 1.0


class Rendered(NamedTuple):
    """A document as text, with what is trained on of it; the rest is read alone.

    Plain text gets the beginning and the end that documents have, and what looks like a special
    token in it is text like any other; the end weighs what the last character weighs. A document
    that `is_whole` has its special tokens written out, and nothing is put around it.
    """

    text: str
    spans: tuple[Span, ...]
    is_whole: bool = False
    spelled: str | None = None  # a special token that the row's own words spell out


@runtime_checkable
class Format(Protocol):
    """What turns a row into documents.

    `reads` is `text` where documents are trained on as a source has them, and `rows` where
    `render` makes them of whole rows. `settled` is asked once, with the first row: it gives the
    format that fits the rows, and what there is to say about that.
    """

    reads: ClassVar[str]
    speaks: ClassVar[bool]
    longer: ClassVar[Longer]  # what is usual
    together: ClassVar[int]  # how many documents of a row stay in one row of tokens
    columns: ClassVar[Mapping[str, Column]]  # of a batch, beside those of every packed sequence

    def settled(self, row: dict[str, Any], where: str) -> "tuple[Format, str | None]": ...

    def render(
        self, row: dict[str, Any], where: str, template: Template | None
    ) -> list[Rendered]: ...


class Contract:
    """The parts of a format that most leave as they are."""

    reads: ClassVar[str] = "rows"
    longer: ClassVar[Longer] = "drop"
    together: ClassVar[int] = 1
    columns: ClassVar[Mapping[str, Column]] = {}
    speaks: ClassVar[bool] = False  # with a template, whether one can talk to what it trains
    template: str | None = None  # what is asked for in place of the tokenizer's own

    def settled(self, row: dict[str, Any], where: str) -> tuple[Any, str | None]:
        return self, None
