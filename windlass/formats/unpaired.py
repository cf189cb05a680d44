"""Unpaired preferences: answers that are desirable or not, each by itself."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from windlass.columns import LENGTH, Column
from windlass.config import listing, section
from windlass.errors import UserError
from windlass.formats import BaseFormat, Rendered, pairs
from windlass.hub.chat_template import Template

# Loss weights by which an objective tells answers apart: beside 0, a weight is not a factor here.
DESIRABLE, UNDESIRABLE = 1.0, 2.0
OTHER = "windlass: the answer to another prompt"  # a column that no file has


@section
class Format(BaseFormat):
    """A prompt with an answer that is labelled desirable or undesirable.

    Both are text, or lists of messages. An example makes two documents: the prompt with its answer,
    and the prompt with the answer to an earlier one, for an estimate of how far the model has moved
    on answers that nobody labelled. Examples before which no other prompt stands only lend theirs.
    """

    speaks: ClassVar[bool] = True
    together: ClassVar[int] = 2
    unit: ClassVar[str] = "answer"
    columns: ClassVar[Mapping[str, Column]] = {"reference": Column(np.float32, (LENGTH,))}

    # the columns; that of the label has true or 1 for desirable, false or 0 for undesirable
    prompt: str = "prompt"
    completion: str = "completion"
    label: str = "label"
    system: str | None = None  # the column of a system message, put before the prompt
    # chat: by a chat template; text: the answer right behind the prompt. null: chat where the
    # tokenizer has a template
    style: Literal["chat", "text"] | None = None
    template: str | None = None  # chatml, or a file with a Jinja template; null: the tokenizer's
    # of a reasoning model: off puts an empty thought before the answer, on the answer's own
    thinking: Literal["none", "off", "on"] = "none"

    def after(self, row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
        has_same_prompt = earlier.get(self.prompt) == row.get(self.prompt)
        other = None if has_same_prompt else earlier.get(self.completion)
        return row | {OTHER: other or earlier.get(OTHER)}

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        self._check(row, where)
        own, other = row[self.completion], row.get(OTHER)
        # Answers that are the same are no pair, and to have none from elsewhere is as good as that.
        if other is None or own == other:
            return []
        beside = (self.completion, self.label, OTHER)
        rest = {name: value for name, value in row.items() if name not in beside}
        both = self._pairs.render(rest | {"own": own, "other": other}, where, template)
        weight = DESIRABLE if row[self.label] else UNDESIRABLE
        return [_weighed(one, weight) for one in both]

    @property
    def _pairs(self) -> pairs.Format:
        return pairs.Format(
            prompt=self.prompt,
            chosen="own",
            rejected="other",
            system=self.system,
            style=self.style,
            template=self.template,
            thinking=self.thinking,
        )

    def _check(self, row: dict[str, Any], where: str) -> None:
        missing = [name for name in (self.prompt, self.completion) if not row.get(name)]
        missing += [] if row.get(self.label) is not None else [self.label]
        if missing:
            has = listing([name for name, value in row.items() if value is not None], "and")
            raise UserError(
                f"{where} has no {listing(missing, 'and')}; it has {has or 'nothing'}. "
                "data.format.prompt, data.format.completion and data.format.label name other "
                "columns"
            )
        if row[self.label] not in (True, False):
            raise UserError(
                f"{where} has {row[self.label]!r} in column {self.label}; a label is true or 1 of "
                "a desirable answer, and false or 0 of an undesirable one"
            )


def _weighed(one: Rendered, weight: float) -> Rendered:
    return one._replace(spans=tuple(span._replace(weight=weight) for span in one.spans))
