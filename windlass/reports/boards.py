"""Held-out grids as a model solves them, pass by pass: pictures that move, and need no program.

A cell is drawn once for every run of passes in which it has the same token. Rules of CSS show the
runs that hold the pass that is chosen; until one is, the passes follow each other.
"""

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby

from windlass.columns import Picture
from windlass.run_folder.answers import Answered, Answers

CELL = 10  # units of a picture
SECONDS = 0.7  # of a pass, while they follow each other
REST = 4  # passes for which the last is shown
BARS = 18  # height of the bars below a picture
COLOR = re.compile(r"#[0-9a-fA-F]{6}")

Span = tuple[int, int]  # passes from 1 on, from the first to the last


def boards(answers: Answers) -> str:
    """The rows of a run's last evaluation, with a choice of the pass, and q below each."""
    passes, spans = len(answers.exact), set[Span]()
    figures = [_figure(row, answers.picture, spans) for row in answers.rows]
    solved = _bars(answers.exact, [True] * passes, spans, "solved")
    several = f"Share of {answers.of} held-out grids that are solved after each pass"
    share = f"{answers.exact[-1]:.0%} after the last" if answers.exact else ""
    hint = (
        f"Held-out grids at step {answers.step:,}, from the one that is solved soonest on. Below "
        "each is q, the probability of halting after a pass; it is green where all is right."
    )
    picks = "".join(_pick(number) for number in range(passes + 1))
    labels = "".join(_label(number) for number in range(passes + 1))
    kinds = {kind: kind for kind in ("given", "right", "wrong")} | {"changed": "changed now"}
    legend = "".join(f'<li><i class="cell-{kind}"></i>{text}</li>' for kind, text in kinds.items())
    return (
        f'<p class="hint">{hint}</p><style>{"".join(_rules(passes, spans))}</style>'
        f'<div class="solving">{picks}<div class="picks">{labels}</div>'
        f'<div class="boards">{"".join(figures)}'
        f"<figure>{solved}<figcaption>{several}: {share}</figcaption></figure></div>"
        f'<ul class="legend">{legend}</ul></div>'
    )


def _pick(number: int) -> str:
    checked = " checked" if number == 0 else ""
    return f'<input type="radio" name="pass" id="pass-{number}"{checked}>'


def _label(number: int) -> str:
    text = "▶" if number == 0 else str(number)
    title = "all passes, one after the other" if number == 0 else f"after pass {number}"
    return f'<label for="pass-{number}" title="{title}">{text}</label>'


def _figure(row: Answered, picture: Picture, spans: set[Span]) -> str:
    exact = row.exact
    soonest = exact.index(True) + 1 if any(exact) else None
    last = row.answers[-1] if row.answers else []
    wrong = sum(row.is_wrong(cell, last) for cell in range(len(last)))
    caption = f"{wrong} cell{'s' * (wrong != 1)} wrong after the last pass"
    if soonest is not None:
        caption = f"solved after pass {soonest}"
        caption += f", and {wrong} wrong after the last" if wrong else ""
    lines = -(-len(row.tokens) // picture.columns)
    wide, high = picture.columns * CELL, lines * CELL
    shapes = "".join([*_cells(row, picture, spans), *_lines(picture, lines)])
    return (
        f'<figure><svg class="board" viewBox="-1 -1 {wide + 2} {high + 2}" role="img" '
        f'aria-label="{caption}">{shapes}</svg>{_bars(row.halt, exact, spans, "q")}'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _cells(row: Answered, picture: Picture, spans: set[Span]) -> Iterator[str]:
    for cell, (token, target) in enumerate(zip(row.tokens, row.targets, strict=True)):
        place = (cell % picture.columns * CELL, cell // picture.columns * CELL)
        is_given = token == target or row.weight[cell] == 0
        if is_given:
            yield _cell(place, "given", token, picture)
        values = [answer[cell] for answer in row.answers]
        for value, (first, last) in _runs(values):
            is_wrong = row.weight[cell] > 0 and value != target
            style = "wrong" if is_wrong else "right"
            if is_wrong or not is_given:
                spans.add((first, last))
                yield _cell(place, f"{style} {_name(first, last)}", value, picture)
            if first > 1 and row.weight[cell] > 0:
                spans.add((first, first))
                x, y = place
                yield (
                    f'<rect class="changed {_name(first, first)}" x="{x + 0.6}" y="{y + 0.6}" '
                    f'width="{CELL - 1.2}" height="{CELL - 1.2}" rx="1.4"/>'
                )


def _runs(values: list[int]) -> Iterator[tuple[int, Span]]:
    """Each value, and the passes for which a cell has it without a change."""
    first = 1
    for value, group in groupby(values):
        last = first + len([*group]) - 1
        yield value, (first, last)
        first = last + 1


def _cell(place: tuple[int, int], style: str, token: int, picture: Picture) -> str:
    x, y = place
    known = 0 <= token < len(picture.symbols)
    text = picture.symbols[token] if known else str(token)
    color = picture.colors[token] if 0 <= token < len(picture.colors) else ""
    ink = f'<rect class="ink" x="{x + 1}" y="{y + 1}" width="8" height="8" style="fill:{color}"/>'
    ink = ink if COLOR.fullmatch(color) else ""
    written = f'<text x="{x + 5}" y="{y + 5.4}">{escape(text)}</text>' if text else ""
    back = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}"/>'
    return f'<g class="{style}">{back}{ink}{written}</g>'


def _lines(picture: Picture, lines: int) -> Iterator[str]:
    """The frame, and heavier lines between boxes."""
    wide, high = picture.columns * CELL, lines * CELL
    yield f'<rect class="frame" x="0" y="0" width="{wide}" height="{high}"/>'
    if picture.box:
        step = picture.box * CELL
        for at in range(step, wide, step):
            yield f'<line class="frame" x1="{at}" x2="{at}" y1="0" y2="{high}"/>'
        for at in range(step, high, step):
            yield f'<line class="frame" x1="0" x2="{wide}" y1="{at}" y2="{at}"/>'


def _bars(values: list[float], are_right: list[bool], spans: set[Span], what: str) -> str:
    """A bar for every pass, from 0 to 1, and a mark below the one that is shown."""
    width, shapes = 100 / max(1, len(values)), []
    for number, (value, is_right) in enumerate(zip(values, are_right, strict=True), start=1):
        spans.add((number, number))
        x, high = (number - 1) * width, max(0.3, min(1.0, max(0.0, value)) * BARS)
        style = "right" if is_right else "wrong"
        shapes.append(
            f'<rect class="q {style}" x="{x + width * 0.12:.2f}" y="{BARS - high:.2f}" '
            f'width="{width * 0.76:.2f}" height="{high:.2f}">'
            f"<title>{what} after pass {number}: {value:.3f}</title></rect>"
            f'<rect class="now {_name(number, number)}" x="{x + width * 0.12:.2f}" '
            f'y="{BARS + 1}" width="{width * 0.76:.2f}" height="1.4" rx="0.7"/>'
        )
    return f'<svg class="qs" viewBox="0 0 100 {BARS + 3}">{"".join(shapes)}</svg>'


def _name(first: int, last: int) -> str:
    return f"s{first}-{last}"


def _rules(passes: int, spans: set[Span]) -> Iterator[str]:
    """Rules that show what holds the pass that is chosen, or let the passes follow each other."""
    whole = passes - 1 + REST
    for first, last in sorted(spans):
        name = _name(first, last)
        begins, ends = (first - 1) / whole, 1.0 if last == passes else last / whole
        frames = [(0.0, first == 1), (begins, True), (ends, False)]
        steps = "".join(
            f"{at:.2%}{{visibility:{'visible' if is_on else 'hidden'}}}"
            for at, is_on in frames
            if at < 1
        )
        yield f"@keyframes {name}{{{steps}}}"
        yield (
            f"#pass-0:checked~.boards .{name}{{animation:{name} {whole * SECONDS:.1f}s step-end "
            "infinite}"
        )
    for number in range(1, passes + 1):
        shown = [f".{_name(*span)}" for span in sorted(spans) if span[0] <= number <= span[1]]
        yield f"#pass-{number}:checked~.boards :is({','.join(shown)}){{visibility:visible}}"
    chosen = ",".join(f'#pass-{n}:checked~.picks label[for="pass-{n}"]' for n in range(passes + 1))
    yield f"{chosen}{{background:var(--accent);color:var(--card)}}"
    at_rest = ",".join(f".{_name(*span)}" for span in sorted(spans) if span[1] == passes)
    yield (
        "@media (prefers-reduced-motion:reduce),print{#pass-0:checked~.boards *{animation:none"
        f"!important}}#pass-0:checked~.boards :is({at_rest or '.none'}){{visibility:visible}}}}"
    )
