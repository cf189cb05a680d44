"""Curves on a terminal, in dots of which a character holds eight."""

import math
from collections.abc import Callable, Sequence

from rich.text import Text

from windlass.reports.comparison import at
from windlass.reports.run_summary import Curve, Number
from windlass.units import number

BLANK = 0x2800  # of Braille's characters
# The bit of each dot of a character, by column and row.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
ACROSS, DOWN = 2, 4


def plot(
    curves: Sequence[tuple[Curve, str]],
    *,
    width: int,
    height: int = 10,
    label: Callable[[Number], str] = number,
    base: Number | None = None,
) -> list[Text]:
    """Curves over the same steps, each in a style, from a base up; line by line."""
    finite = [
        ([(step, x) for step, x in curve if math.isfinite(x)], style) for curve, style in curves
    ]
    points = [point for curve, _ in finite for point in curve]
    if not points:
        return []
    first, last = min(points)[0], max(points)[0]
    values = [value for _, value in points]
    low, high = min(values) if base is None else base, max(values)
    cells = [[BLANK] * width for _ in range(height)]
    styles = [[""] * width for _ in range(height)]
    for curve, style in finite:
        before = None
        for x in range(ACROSS * width):
            step = first + (last - first) * x / (ACROSS * width - 1)
            value = at(curve, step)
            if value is None:
                continue
            share = 0.5 if high == low else (high - value) / (high - low)
            y = round(share * (DOWN * height - 1))
            before = y if before is None else before
            for dot in range(min(y, before + 1), max(y, before - 1) + 1):
                row, column = dot // DOWN, x // ACROSS
                cells[row][column] |= DOTS[x % ACROSS][dot % DOWN]
                styles[row][column] = style
            before = y
    marks = {0: label(high), height - 1: label(low)}
    margin = max(map(len, marks.values()))
    lines = []
    for row in range(height):
        line = Text(f"{marks.get(row, ''):>{margin}} ┤", "dim")
        for cell, style in zip(cells[row], styles[row], strict=True):
            line.append(chr(cell), style)
        lines.append(line)
    steps = f"{first:<{width - len(str(last))}}{last}"
    return [
        *lines,
        Text(f"{'':>{margin}} └{'─' * width}", "dim"),
        Text(f"{'':>{margin}}  {steps}", "dim"),
    ]
