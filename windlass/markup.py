"""HTML by which values show themselves in a notebook: tables of facts, and pages in a frame."""

from collections.abc import Iterable, Sequence
from html import escape

from windlass.terminal import harmless

HEIGHT = 640  # of a page in a frame, in pixels


def facts(lines: Iterable[tuple[str, str]]) -> str:
    """Table of a name and a text in each line."""
    body = "".join(
        f'<tr><th style="text-align:left">{_safe(name)}</th>'
        f'<td style="text-align:left">{_safe(text)}</td></tr>'
        for name, text in lines
    )
    return f"<table>{body}</table>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table with a line of titles."""
    top = "".join(f"<th>{_safe(one)}</th>" for one in head)
    body = "".join(f"<tr>{''.join(f'<td>{_safe(one)}</td>' for one in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def frame(page: str) -> str:
    """Page of its own within another: neither changes how the other looks."""
    style = f"width:100%;height:{HEIGHT}px;border:0"
    return f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}"></iframe>'


def _safe(text: str) -> str:
    return escape(harmless(text))
