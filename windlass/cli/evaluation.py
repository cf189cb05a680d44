"""An evaluation, in lines; a diagnosis, as a table and a plot."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from windlass.cli.plot import plot
from windlass.units import number

if TYPE_CHECKING:
    from windlass.models import Diagnosis

WIDTH = 17  # of the left column
BESIDE = "validation_"  # metrics of the other split
SHORT = 24  # letters of a name above a column, its last
STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")  # of curves, in turn


def table(name: str, metrics: dict[str, Any]) -> Table:
    """Metrics of what was evaluated and of all beside it, a column each."""
    every = {name: metrics} | metrics["beside"]
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for one in every:
        shown.add_column(Text(_short(one)), justify="right", no_wrap=True)
    for metric, value in metrics.items():
        if isinstance(value, int | float) and not metric.startswith(BESIDE) and metric != "looks":
            values = (one.get(metric) for one in every.values())
            cells = ("" if value is None else number(value) for value in values)
            shown.add_row(metric.replace("_", " "), *cells)
    return shown


def _short(name: str) -> str:
    last = name.rstrip("/").rpartition("/")[2]
    return last if len(last) <= SHORT else f"…{last[1 - SHORT :]}"


def lines(metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values, a line each; of two splits a column each, and then the verdict."""
    metrics = {name: value for name, value in metrics.items() if name != "beside"}
    words = ("over", "verdict", "saved", "looks")
    after = {name: metrics.pop(name) for name in words if name in metrics}
    beside = {name: metrics.pop(name) for name in list(metrics) if name.startswith(BESIDE)}
    yield "step", number(metrics.pop("step"))
    if beside:
        yield "", f"{'test':<12}validation"
    for name, value in metrics.items():
        other = beside.get(BESIDE + name)
        shown = number(value) if other is None else f"{number(value):<12}{number(other)}"
        yield name.replace("_", " "), shown
    for name in words[:-1]:
        if name in after:
            yield name, after[name]
    if "looks" in after:
        times = "once" if after["looks"] == 1 else f"{after['looks']} times"
        yield "test split", f"evaluated {times} so far"


def diagnosed(found: "Diagnosis", width: int) -> Iterator[Table | Text]:
    """Measures of each part, a row each, and their curves in one plot."""
    styles = {name: STYLES[i % len(STYLES)] for i, name in enumerate(found.curves)}
    shown = Table(box=box.SIMPLE_HEAD)
    for name in found.rows[0]:
        shown.add_column(name.replace("_", " "), justify="right")
    for row in found.rows:
        first, *others = row.values()
        shown.add_row(Text(first, styles.get(first, "")), *map(_cell, others))
    yield shown
    curves = [(curve, styles[name]) for name, curve in found.curves.items()]
    if lines := plot(curves, width=width - 12, base=0.0):
        yield Text(f"\n{found.title}", "bold")
        yield from lines


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else number(value)
