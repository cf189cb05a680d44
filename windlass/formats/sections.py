"""Columns of an example under headings, in order: a question, its reasoning, its answer."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from windlass.config import listing, section
from windlass.errors import UserError
from windlass.formats import BaseFormat, Longer, Rendered, Span, prompt_text
from windlass.hub.chat_template import Template


@section
class Section:
    """A heading, and what stands under it."""

    heading: str  # as it is written, marks and all: `### Answer`
    column: str | None = None  # whose text stands under it; null: nothing does
    optional: bool = False  # left out of examples where the column is empty or missing
    weight: float = 1.0  # of its tokens in the loss, where they count; 0: they are read alone

    def __post_init__(self):
        if not self.heading.strip():
            raise ValueError("heading is empty; it is a line of text")
        if self.weight < 0:
            raise ValueError(f"weight is {self.weight:g}; it must be 0 or more")


@section
class Format(BaseFormat):
    """Sections under headings, one blank line between them."""

    longer: ClassVar[Longer] = "drop"

    sections: tuple[Section, ...]  # in their order
    # the heading that a prompt ends in when the model writes; null: it is the first section
    response: str | None = None
    # the heading behind which tokens begin to count in the loss, such as that of response; null:
    # all tokens count, headings too
    loss_from: str | None = None

    def __post_init__(self):
        headings = [one.heading for one in self.sections]
        wrong = []
        if not headings:
            wrong.append("sections is empty; it is a list of headings, each with a column")
        for heading in sorted({one for one in headings if headings.count(one) > 1}):
            wrong.append(f"sections has the heading {heading} twice")
        for name in ("response", "loss_from"):
            if (heading := getattr(self, name)) is not None and heading not in headings:
                wrong.append(f"{name} is {heading}; the headings are {listing(headings, 'and')}")
        if wrong:
            raise ValueError(*wrong)

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        text, spans = "", []
        is_counted = self.loss_from is None
        for one, words in self._filled(row, where):
            start = len(text)
            text += "\n\n" * bool(text) + one.heading
            if words:
                text += f"\n{words}"
            if is_counted:
                spans.append(Span(start, len(text), one.weight))
            elif one.heading == self.loss_from:
                is_counted = True
                # Behind the line of the heading, which a prompt ends in.
                spans.append(Span(len(text) - len(words), len(text), one.weight))
        return [Rendered(text, tuple(spans))]

    @property
    def asked_columns(self) -> Sequence[str]:
        """Columns in front of the response that an example needs; of optional ones, the first."""
        before = takewhile(lambda one: one.heading != self.response, self.sections)
        filled = [one for one in before if one.column is not None]
        filled = filled if self.response is not None else filled[:1]
        needed = [one for one in filled if not one.optional] or filled[:1]
        return tuple(dict.fromkeys(one.column for one in needed if one.column is not None))

    def asked(self, question: str | dict[str, Any], where: str) -> str:
        """Prompt of a question: under its heading, up to the heading of the response.

        A text that has headings of its own is continued as it stands.
        """
        columns = self.asked_columns
        if columns and isinstance(question, dict) and columns[0] in question:
            return self.prompt(question, where)
        text = prompt_text(question, where, f", no {listing(columns, 'and')}" if columns else "")
        headings = {one.heading.strip() for one in self.sections}
        if not columns or any(line.strip() in headings for line in text.splitlines()):
            return text
        if len(columns) > 1:
            raise UserError(
                f"{where} is one text, and a prompt of this model has the columns "
                f"{listing(columns, 'and')}; `windlass generate RUN --file FILE.jsonl` takes them "
                "from a file of JSON Lines"
            )
        return self.prompt({columns[0]: text}, where) if text.strip() else text

    def prompt(self, row: dict[str, Any], where: str) -> str:
        """The prompt: the sections up to the response, and its heading."""
        text = ""
        for one, words in self._filled(row, where, until=self.response):
            text += "\n\n" * bool(text) + one.heading
            if one.heading == self.response:
                return f"{text}\n" if one.column else text
            text += f"\n{words}" * bool(words)
            if self.response is None:
                break
        return text

    def _filled(
        self, row: dict[str, Any], where: str, until: str | None = None
    ) -> Iterator[tuple[Section, str]]:
        for one in self.sections:
            words = ""
            if one.column is not None and one.heading != until:
                value = row.get(one.column)
                if value is not None and not isinstance(value, str | int | float):
                    raise UserError(f"{where} has no text in column {one.column}")
                words = "" if value is None else str(value).strip()
                if not words and one.optional:
                    continue
                if not words:
                    has = "has nothing in" if one.column in row else "has no"
                    raise UserError(
                        f"{where} {has} column {one.column}, which the section {one.heading} "
                        f"needs; optional: true leaves it out of such examples. "
                        f"This one has {listing(row, 'and')}"
                    )
            yield one, words
