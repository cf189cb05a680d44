"""The time of a run on its page: by phase, and start by start."""

import time
from collections.abc import Mapping
from html import escape

from windlass.reports import charts, html
from windlass.reports.charts import Segment
from windlass.reports.goodput import Goodput, RunStart
from windlass.units import duration

HEAD = ("start", "began, UTC", "steps", "ended", "running", "goodput", "down before")
ROOM = 0.97  # of the width, for the longest bar
HINT = (
    "Goodput is the share of the running time in steps that count: not those that a restart took "
    "again, and without waiting for data."
)


def time_section(time: Goodput) -> str:
    """The phases of a run over all starts, as a bar and a table."""
    if time.share is None:
        return ""
    seconds = time.seconds
    rows = [(kind, duration(each), f"{each / time.running:.1%}") for kind, each in seconds.items()]
    rows.append(("running time", duration(time.running), "100%"))
    if time.downtime:
        rows.append(("between starts", duration(time.downtime), ""))
    table = html.table(("phase", "time", "share"), rows, caption="Time by phase")
    inside = f'<div class="alone">{_bar("all", seconds, time.running)}</div>'
    legend = html.legend({kind: charts.style(kind) for kind in seconds})
    return html.section("Time", f"{_headline(time)}{inside}{legend}{table}", HINT)


def starts_section(time: Goodput) -> str:
    """Each start of a run: its steps, its end, and its phases as a bar."""
    if not time.starts:
        return ""
    longest = max(start.running for start in time.starts)
    bars = [
        named_bar(f"start {start.number}", start.seconds, longest)
        for start in time.starts
        if len(time.starts) > 1
    ]
    table = html.table(HEAD, lines(time), (1, 3), caption="Starts of the run")
    return html.section("Starts", f'<div class="bars">{"".join(bars)}</div>{table}')


def lines(time: Goodput) -> list[tuple[str, ...]]:
    """Each start in a line of the columns in `HEAD`."""
    gaps = ["", *map(duration, time.gaps)]
    return [_line(*pair) for pair in zip(time.starts, gaps, strict=True)]


def named_bar(name: str, seconds: Mapping[str, float], scale: float) -> str:
    """Phases as a bar with its name and their sum."""
    total = duration(sum(seconds.values()))
    bar = _bar(name, seconds, scale)
    return f'<div class="label">{escape(name)}</div>{bar}<div class="value"><b>{total}</b></div>'


def moment(seconds: float) -> str:
    """A time as a date and a clock, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def _headline(time: Goodput) -> str:
    text = f"goodput {time.share:.1%}"
    if time.downtime:
        text += f", {time.share_with_downtime:.1%} with the time between starts"
    return f'<p class="headline">{text}</p>'


def _line(start: RunStart, gap: str) -> tuple[str, ...]:
    steps = "none" if start.steps is None else f"{start.steps[0]:,} to {start.steps[1]:,}"
    share = f"{start.trained / start.running:.1%}" if start.running else ""
    ran = duration(start.running)
    return str(start.number), moment(start.began), steps, start.ending, ran, share, gap


def _bar(name: str, seconds: Mapping[str, float], scale: float) -> str:
    pieces = [
        Segment(kind, ROOM * each / scale, f"{name}: {kind} {duration(each)}")
        for kind, each in seconds.items()
    ]
    return charts.bar(pieces, most=0.0)
