"""The plan of a run beside what was measured, memory and step time: `plan.json`."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass import files
from windlass.config import tree
from windlass.errors import UserError
from windlass.processes import hosts
from windlass.run import Run
from windlass.units import seconds, size

# Sections of a recipe that change nothing a device holds or computes.
IDLE = ("run", "telemetry", "alarm", "profile", "checkpoint", "start", "tokenizer", "device")
# Figures that are computed with, alone and by part.
FIGURES = "total_bytes step_seconds compiler_bytes device_peak_bytes tokens_per_second".split()
OF_PARTS = ("parts_bytes", "compiler_parts_bytes", "parts_seconds")
_NUMBER = (int, float, type(None))


class Forecast:
    """The file of a run's plan and of what was measured; of several processes the first writes.

    A run that goes on keeps its plan, unless its devices or what they hold have changed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.whole: dict[str, Any] = {}

    def begin(
        self, run: Run, chose: dict[str, Any], plan: Callable[[], dict[str, Any]]
    ) -> str | None:
        """Make the plan of a run on what it `chose`, or take its own; return why there is none."""
        if not hosts.is_first():
            return None
        of = _fingerprint(run, chose)
        try:
            self.whole = read(self.path) or {}
        except UserError:  # somebody spoilt it, and it is no reason not to train
            self.whole = {}
        if self.whole.get("of") == of and self.whole.get("planned"):
            return None
        planned, why = None, None
        try:
            planned = json.loads(json.dumps(plan(), allow_nan=False))
        # Whatever is wrong with a forecast, the run does not need it.
        except Exception as error:
            why = f"this run could not be planned: {_summary(error)}"
        self.whole = {"of": of, "planned": planned, "measured": {}}
        return why

    def keep(self) -> None:
        """Write the plan to its file."""
        if hosts.is_first():
            self._store()

    def measured(self, **figures: Any) -> None:
        """Note what was measured; what is not known is None."""
        if hosts.is_first():
            self.whole["measured"] = {**self.whole.get("measured", {}), **figures}
            self._store()

    def stepped(self, steps: int, **figures: Any) -> None:
        """Note what `steps` of this start took, unless an earlier start took more of them."""
        if steps >= self.whole.get("measured", {}).get("steps", 0):
            self.measured(steps=steps, **figures)

    @property
    def step_seconds(self) -> float | None:
        """Step time that is planned; None where the plan has no estimate."""
        return _planned(self.whole).get("time")

    def _store(self) -> None:
        files.write_json(self.path, self.whole)


def read(path: Path) -> dict[str, Any] | None:
    """Plan and measurements of a run; None where it has noted neither."""
    if not path.exists():
        return None
    try:
        whole = files.parse_json(path.read_bytes())
        known = {"of": whole.get("of"), "planned": whole["planned"], "measured": whole["measured"]}
        planned = known["planned"] or {}
        parts = {name: planned.get(name) or {} for name in ("memory", "time")}
        parts |= {"planned": planned, "measured": known["measured"]}
        if wrong := [name for name, part in parts.items() if not isinstance(part, dict)]:
            raise ValueError(f"{wrong[0]} has no names")
        for part in parts.values():
            figures = {name: part.get(name) for name in FIGURES}
            for name in OF_PARTS:
                figures |= part.get(name) or {}
            if odd := [x for x, value in figures.items() if not isinstance(value, _NUMBER)]:
                raise ValueError(f"{odd[0]} is no number")
        return known
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # it is replaced whole
        raise UserError(f"{path} is not as it was written: {error}; remove it") from None


def errors(whole: dict[str, Any]) -> dict[str, float]:
    """The relative error of each prediction; above 0 it was too high."""
    planned, measured = _planned(whole), whole.get("measured") or {}
    pairs = {
        "memory": (planned.get("memory"), measured_bytes(whole)),
        "compiler": (planned.get("memory"), measured.get("compiler_bytes")),
        "device": (planned.get("memory"), measured.get("device_peak_bytes")),
        "time": (planned.get("time"), measured.get("step_seconds")),
    }
    return {name: plan / actual - 1 for name, (plan, actual) in pairs.items() if plan and actual}


def measured_bytes(whole: dict[str, Any]) -> int | float | None:
    """Peak memory per device: the device's own figure, or else the compiler's."""
    measured = whole.get("measured") or {}
    return measured.get("device_peak_bytes") or measured.get("compiler_bytes")


def line(whole: dict[str, Any]) -> str | None:
    """The plan and what became of it, in a line; None where nothing was planned."""
    planned, wrong = _planned(whole), errors(whole)
    measured = whole.get("measured") or {}
    actual = {"memory": measured_bytes(whole), "time": measured.get("step_seconds")}
    if not planned:
        return None
    before = " and ".join(_figure(name, value) for name, value in planned.items())
    before += " per step" if "time" in planned else ""
    after = " and ".join(_figure(name, actual[name]) for name in planned if actual[name])
    if not after:
        return f"{before} predicted"
    off = ", ".join(f"{wrong[name]:+.0%}" for name in planned if name in wrong)
    return f"{before} predicted, {after} measured ({off})"


def _planned(whole: dict[str, Any]) -> dict[str, int | float]:
    """The totals that were predicted, of those that were."""
    planned = whole.get("planned") or {}
    memory, time = planned.get("memory") or {}, planned.get("time") or {}
    totals = {"memory": memory.get("total_bytes"), "time": time.get("step_seconds")}
    return {name: value for name, value in totals.items() if value}


def _figure(name: str, value: int | float) -> str:
    return size(value) if name == "memory" else seconds(value)


def _fingerprint(run: Run, chose: dict[str, Any]) -> str:
    """Hash of what a plan depends on: starts with the same one share a plan."""
    sections = {name: x for name, x in tree(run).items() if name not in IDLE}
    text = json.dumps([sections, chose], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _summary(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return (
        first if isinstance(error, UserError) else f"{type(error).__name__}: {first}".rstrip(": ")
    )
