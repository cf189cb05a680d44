"""Parts of an HTML page that loads nothing from elsewhere: document, sections, tables, tiles."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

LIVE_SECONDS = 2.0  # between two looks of a page that is served live

Pairs = Iterable[tuple[str, str]]


def document(title: str, lead: str, body: str, *, is_live: bool = False) -> str:
    """A whole page; one that is live fetches itself again from where it was served."""
    style, script = _part("page.css"), _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser holds the page to its promise: no request, but to itself where it is live.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    own = "self" if is_live else "none"
    policy += f"img-src data:; connect-src '{own}'; base-uri 'none'"
    live = f' data-live="{1000 * LIVE_SECONDS:.0f}"' if is_live else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body{live}>\n<main>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>\n'
        f'{body}</main>\n<p class="live" role="status"></p>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def section(title: str, inside: str, hint: str = "") -> str:
    """A part of a page under its title; none where nothing is inside."""
    lead = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{inside}</section>\n" if inside else ""


def tile(value: str, name: str) -> str:
    return (
        f'<div class="card"><div class="big">{escape(value)}</div>'
        f'<div class="chip">{escape(name)}</div></div>'
    )


def table(
    head: Sequence[str], lines: Iterable[Sequence[str]], texts: Iterable[int] = (), *, caption: str
) -> str:
    """A table of numbers; `texts` are columns of words. Names of lines stand in the first."""
    texts = {*texts}
    heads = "".join(
        f'<th scope="col"{_text(i in texts)}>{escape(name)}</th>' for i, name in enumerate(head)
    )
    body = "".join(f"<tr>{_cells(line, texts)}</tr>" for line in lines)
    if not body:
        return ""
    name = f'<caption class="unseen">{escape(caption)}</caption>'
    inside = f"<table>{name}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{inside}</div>'


def facts(pairs: Pairs) -> str:
    """Names and values, one in a line."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f'<dl class="facts">{lines}</dl>' if lines else ""


def legend(styles: Mapping[str, str]) -> str:
    """Names of colours, by their style."""
    keys = (f'<li><i class="{style}"></i>{escape(name)}</li>' for name, style in styles.items())
    return f'<ul class="legend">{"".join(keys)}</ul>' if styles else ""


def details(summary: str, inside: str) -> str:
    """A part that is unfolded on request."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def _cells(line: Sequence[str], texts: set[int]) -> str:
    first, *rest = line
    return f'<th scope="row">{escape(first)}</th>' + "".join(
        f"<td{_text(i in texts)}>{escape(cell)}</td>" for i, cell in enumerate(rest, start=1)
    )


def _text(is_text: bool) -> str:
    return ' class="left"' if is_text else ""


def _part(name: str) -> str:
    return resources.files("windlass.reports").joinpath(name).read_text(encoding="utf-8")
