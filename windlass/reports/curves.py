"""Curves over the steps of a run, as SVG that needs nothing else."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from windlass.reports.run_summary import Curve, Number

WIDTH, HEIGHT = 470, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 12, 28  # what axes and their numbers take of it
MOST = 400  # points of a curve that are drawn
TICKS = 4  # lines across it, about


class CurveStyle(NamedTuple):
    """A curve of a picture, and which of the page's styles it has there."""

    name: str
    curve: Curve
    style: str


def chart(
    lines: Sequence[CurveStyle], show: Callable[[Number], str], *, base: Number | None = None
) -> str:
    """Curves over the same steps, from a base up; hovering over a point shows its numbers."""
    thin = [one._replace(curve=_downsampled(one.curve)) for one in lines]
    points = [point for one in thin for point in one.curve]
    if not points:
        return ""
    first, last = min(points)[0], max(points)[0]
    lowest = min(y for _, y in points) if base is None else base
    marks = ticks(lowest, max(y for _, y in points))
    low, high = marks[0], marks[-1]

    def place(point: tuple[int, Number]) -> tuple[str, str]:
        share = 0.5 if last == first else (point[0] - first) / (last - first)
        x = LEFT + (WIDTH - LEFT - RIGHT) * share
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - point[1]) / (high - low)
        return f"{x:.1f}", f"{y:.1f}"

    shapes = []
    for mark in marks:
        _, y = place((first, mark))
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        shapes.append(f'<text class="tick" x="{LEFT - 8}" y="{y}">{escape(show(mark))}</text>')
    for step, anchor in ((first, "start"), (last, "end")):
        x, _ = place((step, low))
        where = f'x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}"'
        shapes.append(f'<text class="step" {where}>step {step:,}</text>')
    for one in thin:
        path = " ".join(",".join(place(point)) for point in one.curve)
        shapes.append(f'<polyline class="{one.style}" points="{path}"/>')
    for one in thin:
        for point in one.curve:
            x, y = place(point)
            tooltip = escape(f"step {point[0]:,}: {one.name} {show(point[1])}")
            dot = f'<circle class="{one.style}" cx="{x}" cy="{y}" r="4">'
            shapes.append(f"{dot}<title>{tooltip}</title></circle>")
    names = escape(", ".join(one.name for one in thin))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{names} over steps"'
    return f'<svg class="curves" {box}>{"".join(shapes)}</svg>'


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


def _downsampled(curve: Curve) -> Curve:
    """At most `MOST` points of a curve, its ends among them, without those that are not finite."""
    finite = [(step, value) for step, value in curve if math.isfinite(value)]
    if len(finite) <= MOST:
        return finite
    stride = (len(finite) - 1) / (MOST - 1)
    return [finite[round(number * stride)] for number in range(MOST)]
