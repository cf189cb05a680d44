"""Charts as SVG that needs nothing else: stacked bars, and points with whiskers."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from windlass.planning.cost import Interval

WIDTH, HEIGHT = 900, 440  # of a picture of points
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 20, 56
FINE = (1, 1.5, 2, 3, 4, 5, 6, 8)  # ticks of a decade, where there is little more than one
END = 0.975  # where a bar ends that is cut
TEXT = 7.2  # the width of a letter, about


class Segment(NamedTuple):
    """Part of a bar."""

    name: str  # by which it is coloured
    size: float  # in shares of the width
    tooltip: str


class Point(NamedTuple):
    """Point of a scatter plot, and its error in each direction."""

    name: str
    x: Interval
    y: Interval
    tooltip: str
    style: str  # one of those that the page knows
    is_named: bool = True


class Axis(NamedTuple):
    """Logarithmic axis of a picture: title, range, and labelled ticks."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """Position from 0 to 1; each decade is as long as the next."""
        low, high = math.log(self.low), math.log(self.high)
        return (math.log(value) - low) / (high - low)


def bar(pieces: Iterable[Segment], *, most: float, limit: float | None = None) -> str:
    """Stacked bar with a whisker to `most`, up to a `limit`; cut where there is no room."""
    at, shapes = 0.0, []
    pieces = list(pieces)
    is_cut, most = sum(piece.size for piece in pieces) > END, min(most, 1.0)
    if limit is not None:
        shapes.append(f'<rect class="back" x="0" y="4" width="{limit:.3%}" height="22"/>')
    for piece in pieces:
        wide = min(piece.size, END - at) if is_cut else piece.size
        if wide <= 0:
            continue
        shapes.append(
            f'<rect class="part {style(piece.name)}" x="{at:.3%}" y="4" width="{wide:.3%}" '
            f'height="22"><title>{escape(piece.tooltip)}</title></rect>'
        )
        at += wide
    if is_cut:
        shapes.append(f'<text class="cut" x="{END + 0.005:.1%}" y="20">▸</text>')
    elif most > at:
        shapes.append(
            f'<line class="whisker" x1="{at:.3%}" x2="{most:.3%}" y1="15" y2="15"/>'
            f'<line class="whisker" x1="{most:.3%}" x2="{most:.3%}" y1="10" y2="20"/>'
        )
    if limit is not None:
        shapes.append(f'<line class="limit" x1="{limit:.3%}" x2="{limit:.3%}" y1="0" y2="30"/>')
    label = escape("; ".join(piece.tooltip for piece in pieces))
    box = f'width="100%" height="30" role="img" aria-label="{label}"'
    return f'<svg class="bar" {box}>{"".join(shapes)}</svg>'


def points(series: Sequence[Point], x: Axis, y: Axis) -> str:
    """Scatter plot, each point with whiskers as long as it may be off; those of a name joined."""
    inner, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    shapes = [_grid(x, y)]
    places = [
        [
            [LEFT + inner * x.place(value) for value in point.x],
            [TOP + high * (1 - y.place(value)) for value in point.y],
        ]
        for point in series
    ]
    # No name stands upon a point.
    occupied = [(at_x - 8, at_x + 8, at_y + 4) for (_, at_x, _), (_, at_y, _) in places]
    first: dict[str, tuple[float, float]] = {}
    for point, ((left, at_x, right), (bottom, at_y, top)) in zip(series, places, strict=True):
        from_x, from_y = first.setdefault(point.name, (at_x, at_y))
        shapes.append(
            f'<line class="link" x1="{from_x:.1f}" y1="{from_y:.1f}" x2="{at_x:.1f}" '
            f'y2="{at_y:.1f}"/>'
        )
        shapes.append(
            f'<g class="{point.style}"><title>{escape(point.tooltip)}</title>'
            f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" y1="{at_y:.1f}" '
            f'y2="{at_y:.1f}"/><line class="whisker" x1="{at_x:.1f}" x2="{at_x:.1f}" '
            f'y1="{bottom:.1f}" y2="{top:.1f}"/>'
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="6"/>'
        )
        if point.is_named:
            place_x, place_y, anchor = _beside(at_x, at_y, point.name, occupied)
            shapes.append(
                f'<text x="{place_x:.1f}" y="{place_y:.1f}" text-anchor="{anchor}">'
                f"{escape(point.name)}</text>"
            )
        shapes.append("</g>")
    return f'<svg class="points" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(shapes)}</svg>'


def axis(title: str, spans: Sequence[Interval], size: float = 1.0) -> Axis:
    """Axis that holds all spans, with ticks at 1, 2 and 5 of each decade of a unit, or fewer."""
    low = min(span.low for span in spans) / size / 1.15
    high = max(span.high for span in spans) / size * 1.15
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high / low > 1e3 else (1, 2, 5) if high / low > 10 else FINE
    ticks = [step * 10.0**power for power in powers for step in steps]
    labelled = [(tick * size, f"{tick:,.10g}") for tick in ticks if low <= tick <= high]
    return Axis(title, low * size, high * size, labelled)


def _grid(x: Axis, y: Axis) -> str:
    inner, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    shapes = []
    for value, label in x.ticks:
        at = LEFT + inner * x.place(value)
        shapes.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + high}"/>'
            f'<text class="tick" x="{at:.1f}" y="{TOP + high + 18}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    for value, label in y.ticks:
        at = TOP + high * (1 - y.place(value))
        shapes.append(
            f'<line class="grid" x1="{LEFT}" x2="{LEFT + inner}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{LEFT - 10}" y="{at + 4:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
    shapes.append(
        f'<text class="title" x="{LEFT + inner / 2}" y="{HEIGHT - 12}" text-anchor="middle">'
        f"{escape(x.title)}</text>"
        f'<text class="title" transform="translate(18 {TOP + high / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y.title)}</text>'
    )
    return "".join(shapes)


def _beside(
    x: float, y: float, name: str, occupied: list[tuple[float, float, float]]
) -> tuple[float, float, str]:
    """Position of a label that has room: beside its point, or above or below it."""
    wide = TEXT * len(name)
    for dx, dy in ((11, -8), (11, 17), (-11, -8), (-11, 17), (11, -24), (11, 33), (-11, -24)):
        start = x + dx if dx > 0 else x + dx - wide
        is_free = all(
            start > right or start + wide < left or abs(y + dy - other) > 14
            for left, right, other in occupied
        )
        if is_free and LEFT < start and start + wide < WIDTH:
            break
    occupied.append((start, start + wide, y + dy))
    return x + dx, y + dy, "start" if dx > 0 else "end"


def style(name: str) -> str:
    """The name of a part in the page's style sheet."""
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
