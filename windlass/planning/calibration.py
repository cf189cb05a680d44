"""Calibration: factors for the time estimates of a chip, fitted to measured runs."""

import datetime
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass import files
from windlass.analysis.fusion import Amount
from windlass.config import folder, listing
from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.run_folder import plan_file

# Parts of a step that are as fast as one thing of a chip is.
GROUPS = {
    "compute": ("matmuls", "attention", "head"),
    "memory": ("elementwise", "optimiser"),
    "latency": ("loops",),
    "communication": ("communication",),
}
LEAST = 3  # runs of a chip, or what is fitted is their noise
# Ridge penalty on factors that are not 1: what few runs do not determine stays as it was.
DOUBT = 0.3
SURE = 0.05  # of a step's time; no plan is more exact than that


class Fitted(NamedTuple):
    """Calibration of a chip: measured over estimated time by part of a step, from a user's runs."""

    chip: str
    factors: dict[str, Amount]  # by group
    error: Amount  # the largest that was left
    before: Amount  # median error of the plans as the table makes them
    after: Amount
    runs: list[str]
    date: str

    @property
    def note(self) -> str:
        count = f"{len(self.runs)} runs on {self.chip}"
        return f"times are calibrated by {count} ({self.date}), and were off by {self.after:.0%}"


class _Run(NamedTuple):
    name: str
    chip: str
    parts: dict[str, Amount]  # as the table makes them
    measured: Amount


def find(chip: str) -> Fitted | None:
    """The calibration of a chip by the user's own runs."""
    return _stored().get(chip)


def calibrate(places: Iterable[Path]) -> list[Fitted]:
    """Fit the factors of every chip that has enough of these runs, and store them."""
    runs = [run for place in places if (run := _read(place)) is not None]
    by_chip: dict[str, list[_Run]] = {}
    for run in runs:
        by_chip.setdefault(run.chip, []).append(run)
    calibrations = [_fit(chip, some) for chip, some in by_chip.items() if len(some) >= LEAST]
    if not calibrations:
        counts = [f"{len(some)} on {chip}" for chip, some in by_chip.items()]
        there = f"there are {listing(counts, 'and')}" if counts else "there is none"
        raise UserError(
            f"{LEAST} runs on the same chip are needed, each with a plan and a measured step; "
            f"{there}. A run has both when it has ended: windlass plan --calibrate RUN RUN RUN"
        )
    _store(calibrations)
    return calibrations


def file() -> Path:
    return folder.folder() / "efficiency.json"


def _read(place: Path) -> _Run | None:
    whole = plan_file.read(place / folders.PLAN) or {}
    planned, measured = whole.get("planned") or {}, whole.get("measured") or {}
    time, seconds = planned.get("time") or {}, measured.get("step_seconds")
    if not time or not seconds:
        return None
    factors = time.get("factors") or {}
    parts = {
        name: value / factors.get(_group(name), 1.0)
        for name, value in time["parts_seconds"].items()
    }
    return _Run(str(place), planned["target"]["chip"], parts, seconds)


def _group(part: str) -> str | None:
    return next((name for name, parts in GROUPS.items() if part in parts), None)


def scaled(parts: dict[str, Amount], factors: dict[str, Amount]) -> dict[str, Amount]:
    """Parts of a step, each scaled by the factor of its group."""
    return {name: value * factors.get(_group(name) or "", 1.0) for name, value in parts.items()}


def _fit(chip: str, runs: Sequence[_Run]) -> Fitted:
    """Ridge regression of relative errors, regularised towards the table."""
    groups = [name for name in GROUPS if any(_sum(run, name) for run in runs)]
    shares = [[_sum(run, name) / run.measured for name in groups] for run in runs]
    rest = [1 - sum(v for n, v in r.parts.items() if _group(n) is None) / r.measured for r in runs]
    ridge = DOUBT * np.eye(len(groups))
    design = np.vstack([np.array(shares), ridge])
    response = np.concatenate([np.array(rest), ridge.sum(axis=1)])
    solution = np.linalg.lstsq(design, response, rcond=None)[0]
    factors = {name: float(max(0.1, x)) for name, x in zip(groups, solution, strict=True)}
    before, after = ([_error(run, by) for run in runs] for by in ({}, factors))
    if statistics.median(after) >= statistics.median(before):  # what is left is no part's fault
        factors, after = dict.fromkeys(groups, 1.0), before
    worst = max(SURE, max(after))
    today = datetime.date.today().isoformat()
    names = [run.name for run in runs]
    usual, left = statistics.median(before), statistics.median(after)
    return Fitted(chip, factors, worst, usual, left, names, today)


def _sum(run: _Run, group: str) -> Amount:
    return sum(run.parts.get(part, 0.0) for part in GROUPS[group])


def _error(run: _Run, factors: dict[str, Amount]) -> Amount:
    return abs(sum(scaled(run.parts, factors).values()) / run.measured - 1)


def _stored() -> dict[str, Fitted]:
    if not file().is_file():
        return {}
    try:
        whole = json.loads(file().read_bytes())
        return {chip: Fitted(chip=chip, **entry) for chip, entry in whole.items()}
    except (ValueError, TypeError, AttributeError) as error:  # no JSON, or other names
        raise UserError(f"{file()} is not as it was written: {error}; remove it") from None


def _store(new: Sequence[Fitted]) -> None:
    every, place = _stored() | {one.chip: one for one in new}, file()
    whole = {name: one._asdict() for name, one in every.items()}
    for entry in whole.values():
        entry.pop("chip")
    with files.writable(place):
        files.write_json(place, whole)
