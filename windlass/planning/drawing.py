"""Pictures in a page: curves over steps, and bars of parts, as SVG that needs nothing else."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from windlass.planning.account import Curve, Number

WIDTH, HEIGHT = 470, 220  # of the picture of a curve
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 12, 28  # what axes and their numbers take of it
MOST = 400  # points of a curve that are drawn
TICKS = 4  # lines across it
WIDE, BAR, GAP = 1040, 30, 12  # of a picture of bars: the height of one, and what is between two
FAR = 2.5  # times the longest bar: a limit beyond would make them too small to be read


class Line(NamedTuple):
    """A curve of a picture, and the colour that it has there: a number of the page's."""

    name: str
    curve: Curve
    colour: int


class Bar(NamedTuple):
    """Parts of a whole, each with its colour."""

    name: str
    parts: Sequence[tuple[str, Number, int]]


def chart(
    lines: Sequence[Line], shown: Callable[[Number], str], *, base: Number | None = None
) -> str:
    """Curves over the same steps, from a base up; pointing at a point of one tells its numbers."""
    thin = [Line(one.name, _thinned(one.curve), one.colour) for one in lines]
    points = [point for one in thin for point in one.curve]
    if not points:
        return ""
    first, last = min(points)[0], max(points)[0]
    lowest = min(y for _, y in points) if base is None else base
    marks = ticks(lowest, max(y for _, y in points))
    low, high = marks[0], marks[-1]

    def x(step: Number) -> float:
        wide = WIDTH - LEFT - RIGHT
        return LEFT + (wide / 2 if last == first else wide * (step - first) / (last - first))

    def y(value: Number) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    drawn = []
    for mark in marks:
        at = f"{y(mark):.1f}"
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{at}" class="left">{escape(shown(mark))}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        place = f'x="{x(step):.1f}" y="{HEIGHT - 8}"'
        drawn.append(f'<text {place} text-anchor="{anchor}">step {step:,}</text>')
    for one in thin:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in one.curve)
        drawn.append(f'<polyline class="line c{one.colour}" points="{path}"/>')
    for one in thin:
        for step, value in one.curve:
            told = escape(f"step {step:,}: {one.name} {shown(value)}")
            place = f'cx="{x(step):.1f}" cy="{y(value):.1f}"'
            drawn.append(
                f'<circle class="c{one.colour}" {place} r="4"><title>{told}</title></circle>'
            )
    names = escape(", ".join(one.name for one in thin))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{names} over steps"'
    return f"<svg {box}>{''.join(drawn)}</svg>"


def bars(every: Sequence[Bar], limit: Number | None, shown: Callable[[Number], str]) -> str:
    """Bars of parts under each other on one scale, and a line where there is no more room."""
    whole = max(sum(size for _, size, _ in one.parts) for one in every)
    has_limit = limit is not None and limit <= FAR * whole
    scale = max(whole, limit if has_limit and limit else 0.0)
    left, right = 130, 90
    wide, height = WIDE - left - right, len(every) * (BAR + GAP) + GAP
    drawn = []
    for number, one in enumerate(every):
        top, at = GAP + number * (BAR + GAP), float(left)
        middle = top + BAR / 2
        drawn.append(f'<text x="{left - 10}" y="{middle}" class="left">{escape(one.name)}</text>')
        for name, size, colour in one.parts:
            part = wide * size / scale
            told = escape(f"{one.name}: {name} {shown(size)}")
            place = f'x="{at:.1f}" y="{top}" width="{max(0.5, part - 2):.1f}" height="{BAR}"'
            drawn.append(f'<rect class="c{colour}" {place} rx="3"><title>{told}</title></rect>')
            at += part
        total = sum(size for _, size, _ in one.parts)
        drawn.append(
            f'<text x="{at + 8:.1f}" y="{middle}" class="right">{escape(shown(total))}</text>'
        )
    if has_limit and limit:
        place = f'x1="{left + wide * limit / scale:.1f}" x2="{left + wide * limit / scale:.1f}"'
        told = escape(f"a program may use {shown(limit)}")
        drawn.append(
            f'<line class="limit" {place} y1="2" y2="{height - 2}"><title>{told}</title></line>'
        )
    box = f'viewBox="0 0 {WIDE} {height}" role="img" aria-label="memory by part"'
    return f"<svg {box}>{''.join(drawn)}</svg>"


def ticks(low: Number, high: Number) -> list[Number]:
    """Round numbers from below the lowest to above the highest."""
    if low == high:
        spread = abs(low) or 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * size for size in (1, 2, 2.5, 5, 10) if unit * size >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, last + 1)]


def _thinned(curve: Curve) -> Curve:
    """At most so many points of a curve, its ends among them; without those that are no numbers."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) <= MOST:
        return finite
    stride = (len(finite) - 1) / (MOST - 1)
    return [finite[round(number * stride)] for number in range(MOST)]
