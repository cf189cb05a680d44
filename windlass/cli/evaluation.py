"""An evaluation, in lines."""

from collections.abc import Iterator
from typing import Any

from windlass.units import number

WIDTH = 17  # of the left column
BESIDE = "validation_"  # metrics of the other split


def lines(metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values, a line each; of two splits a column each, and then the verdict."""
    metrics = dict(metrics)
    after = {name: metrics.pop(name) for name in ("over", "verdict", "looks") if name in metrics}
    beside = {name: metrics.pop(name) for name in list(metrics) if name.startswith(BESIDE)}
    yield "step", number(metrics.pop("step"))
    if beside:
        yield "", f"{'test':<12}validation"
    for name, value in metrics.items():
        other = beside.get(BESIDE + name)
        shown = number(value) if other is None else f"{number(value):<12}{number(other)}"
        yield name.replace("_", " "), shown
    for name in ("over", "verdict"):
        if name in after:
            yield name, after[name]
    if "looks" in after:
        times = "once" if after["looks"] == 1 else f"{after['looks']} times"
        yield "test split", f"evaluated {times} so far"
