"""Console of the terminal in which no text is a control code, whoever wrote it."""

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters but for line feeds and tabs, what reverses the direction of text, and
# surrogates, which stand for bytes of a file name and which no encoding can write.
HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(Console):
    """Console that shows control characters of a text as `\ufffd`.

    Names of files, texts of examples and what an untrained model writes hold any character, escape
    codes too, which would move the cursor, set the title or write to the clipboard.
    """

    def __init__(self, **how: Any):
        # Nor is it markup: a run may be named `[/x]`. A notebook gets lines, not a box for each.
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
        super().__init__(**plain, force_jupyter=False, **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Rich's own codes are apart: in `control`, or added from the style later.
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def harmless(text: str) -> str:
    """Text without control characters."""
    return HARMFUL.sub("\ufffd", text)
