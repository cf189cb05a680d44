"""Curves over the steps of a run: a picture that a pointer or the arrow keys read the values of."""

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from windlass.reports import html
from windlass.reports.run_summary import Curve, Number

MOST = 400  # points of a curve that are drawn
TICKS = 4  # lines across it, about
ROWS = 12  # of its table
SAME = 1e-5  # of a value: a smaller spread of a curve is not drawn
SIDE = 1000  # units of a picture, which is stretched to its place


class CurveStyle(NamedTuple):
    """A curve of a picture, and which of the page's styles it has there."""

    name: str
    curve: Curve
    style: str


def chart(
    title: str,
    lines: Sequence[CurveStyle],
    show: Callable[[Number], str],
    *,
    base: Number | None = None,
    restarts: Sequence[int] = (),
) -> str:
    """Curves over the same steps, from a base up, with a line where a start resumed the run."""
    thin = [one._replace(curve=_downsampled(one.curve)) for one in lines]
    thin = [one for one in thin if one.curve]
    points = [point for one in thin for point in one.curve]
    if not points:
        return ""
    first, last = min(points)[0], max(points)[0]
    lowest = min(y for _, y in points) if base is None else base
    marks = ticks(lowest, max(y for _, y in points))
    low, high = marks[0], marks[-1]

    def across(step: int) -> float:
        return 0.5 if last == first else (step - first) / (last - first)

    def down(value: Number) -> float:
        return (high - value) / (high - low)

    shapes = []
    for mark in marks:
        y = f"{SIDE * down(mark):.1f}"
        shapes.append(f'<line class="grid" x1="0" x2="{SIDE}" y1="{y}" y2="{y}"/>')
    for step in sorted({step for step in restarts if first <= step <= last}):
        x = f"{SIDE * across(step):.1f}"
        shapes.append(f'<line class="restart" x1="{x}" x2="{x}" y1="0" y2="{SIDE}"/>')
    for one in thin:
        path = " ".join(f"{SIDE * across(x):.1f},{SIDE * down(y):.1f}" for x, y in one.curve)
        style = one.style
        if len(one.curve) == 1:  # a dot, by the round ends of a line
            path, style = f"{path} {path}", f"{style} single"
        shapes.append(f'<polyline class="{style}" points="{path}"/>')
    labels = "".join(
        f'<span class="tick" style="top:{down(y):.2%}">{escape(label)}</span>'
        for y, label in zip(marks, _labels(marks, show), strict=True)
    )
    values = [
        {
            "name": one.name,
            "style": one.style,
            "points": [[x, round(across(x), 4), round(down(y), 4), show(y)] for x, y in one.curve],
        }
        for one in thin
    ]
    picture = (
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )
    ends = f"{_summary(thin, show)}; the arrow keys read values"
    plot = (
        f'<div class="plot" role="slider" tabindex="0" aria-label="{escape(title)} over steps" '
        f'aria-valuemin="{first}" aria-valuemax="{last}" aria-valuenow="{last}" '
        f'aria-valuetext="{escape(ends)}" data-curves="{escape(json.dumps(values))}">'
        f"{picture}{labels}</div>"
    )
    axis = f'<div class="axis"><span>step {first:,}</span><span>step {last:,}</span></div>'
    styles = {one.name: one.style for one in thin} if len(thin) > 1 else {}
    if 'class="restart"' in picture:
        styles["resumed here"] = "restart-key"
    return f'<div class="chart">{plot}{axis}{html.legend(styles)}{_table(title, thin, show)}</div>'


def ticks(low: Number, high: Number) -> list[Number]:
    """Round numbers from below the lowest to above the highest."""
    if high - low <= SAME * abs(high):
        spread = abs(low) or 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * size for size in (1, 2, 2.5, 5, 10) if unit * size >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, last + 1)]


def _labels(marks: Sequence[Number], show: Callable[[Number], str]) -> list[str]:
    """Labels of ticks; where they would be the same, with as many digits as tell them apart."""
    labels = [show(mark) for mark in marks]
    return labels if len({*labels}) == len(labels) else [f"{mark:.7g}" for mark in marks]


def _summary(lines: Sequence[CurveStyle], show: Callable[[Number], str]) -> str:
    """The ends of each curve in words, for who does not see them."""
    parts = []
    for name, curve, _ in lines:
        (start, before), (end, after) = curve[0], curve[-1]
        parts.append(f"{name} from {show(before)} at step {start:,} to {show(after)} at {end:,}")
    return "; ".join(parts)


def _table(title: str, lines: Sequence[CurveStyle], show: Callable[[Number], str]) -> str:
    """Some values of the curves, at steps of the first."""
    steps = [step for step, _ in lines[0].curve]
    stride = max(1, (len(steps) - 1) / (ROWS - 1))
    some = sorted({steps[min(round(i * stride), len(steps) - 1)] for i in range(ROWS)})
    values = [dict(one.curve) for one in lines]
    rows = [
        (f"{step:,}", *(show(one[step]) if step in one else "" for one in values)) for step in some
    ]
    table = html.table(["step", *(one.name for one in lines)], rows, caption=f"{title} by step")
    return html.details("values", table)


def _downsampled(curve: Curve) -> Curve:
    """At most `MOST` points: ends and, of each stretch, lowest and highest, so that spikes stay.

    Points that are not finite are left out.
    """
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) <= MOST:
        return finite
    inner, stretches = finite[1:-1], (MOST - 2) // 2
    kept = {finite[0], finite[-1]}
    for number in range(stretches):
        part = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted(kept)
