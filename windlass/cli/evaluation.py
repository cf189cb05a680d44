"""An evaluation, in lines."""

from collections.abc import Iterator
from typing import Any

from windlass.units import number

WIDTH = 17  # of the left column
BESIDE = "validation_"  # what was measured of other rows than those asked for


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A name and a value in each; of two splits a column each, and then what they say together."""
    found = dict(found)
    after = {name: found.pop(name) for name in ("over", "verdict", "looks") if name in found}
    beside = {name: found.pop(name) for name in list(found) if name.startswith(BESIDE)}
    yield "step", number(found.pop("step"))
    if beside:
        yield "", f"{'test':<12}validation"
    for name, value in found.items():
        other = beside.get(BESIDE + name)
        shown = number(value) if other is None else f"{number(value):<12}{number(other)}"
        yield name.replace("_", " "), shown
    for name in ("over", "verdict"):
        if name in after:
            yield name, after[name]
    if "looks" in after:
        times = "once" if after["looks"] == 1 else f"{after['looks']} times"
        yield "test split", f"evaluated {times} so far"
