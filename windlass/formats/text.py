"""Documents as a source has them, every token trained on."""

from typing import Any, ClassVar

from windlass.config import section
from windlass.formats import BaseFormat, Longer, Rendered, Span
from windlass.hub.chat_template import Template


@section
class Format(BaseFormat):
    """The text or the token ids of a source, all of it trained on."""

    reads: ClassVar[str] = "text"
    longer: ClassVar[Longer] = "split"

    def render(self, row: dict[str, Any], where: str, template: Template | None) -> list[Rendered]:
        text = row["text"]
        return [Rendered(text, (Span(0, len(text)),))]
