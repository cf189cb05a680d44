"""Runs on a terminal: a table of them, one in full, and what goes when some are deleted."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from windlass.errors import UserError
from windlass.run_folder import folder as folders
from windlass.run_folder.runs import Standing
from windlass.telemetry import about, metrics
from windlass.units import duration, number, size

COLUMNS = ("run", "recipe", "state", "step", "loss", "validation", "size", "age")
STYLES = {"training": "green", "finished": "", "stopped": "yellow", "damaged": "red"}


def table(standings: Sequence[Standing], now: float | None = None) -> Table:
    """Table of a run per line. The column of recipes is left out where runs are named for them."""
    now = time.time() if now is None else now
    has_recipe = any(not run.folder.name.startswith(run.recipe) for run in standings)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        if name != "recipe" or has_recipe:
            right = name not in ("run", "recipe", "state")
            shown.add_column(name, justify="right" if right else "left", no_wrap=True)
    for run in standings:
        cells = {
            "run": run.folder.name,
            "recipe": run.recipe,
            "state": run.state,
            "step": _step(run),
            "loss": _number(run.loss),
            "validation": _number(run.validation_loss),
            "size": size(run.size_bytes),
            "age": duration(max(0.0, now - run.changed)),
        }
        if not has_recipe:
            del cells["recipe"]
        shown.add_row(*cells.values(), style=STYLES[run.state])
    return shown


def facts(run: Standing) -> Iterator[tuple[str, str]]:
    """Facts of a run, with the versions and devices of its last start."""
    yield "run", str(run.folder)
    yield "recipe", run.recipe
    yield "state", run.state
    yield "step", _step(run)
    yield "loss", _number(run.loss)
    yield "validation", _number(run.validation_loss)
    yield "size", size(run.size_bytes)
    try:
        yield from _starts(about.read(run.folder / folders.ABOUT))
    except (LookupError, TypeError, AttributeError):
        file = run.folder / folders.ABOUT
        raise UserError(f"{file} is not as it was written; remove it") from None


def as_json(standings: Sequence[Standing]) -> str:
    """JSON of runs, for another program."""
    records = [vars(run) | {"folder": str(run.folder)} for run in standings]
    plain = [{name: metrics.plain(value) for name, value in one.items()} for one in records]
    return json.dumps(plain, allow_nan=False, indent=2)


def _starts(starts: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for start in starts:
        end = f", ended {start['ended']} at step {start['at']}" if "ended" in start else ""
        yield "started", f"{start['began']} from step {start['step']}{end}"
    if starts:
        yield from _made_with(starts[-1])


def _made_with(start: dict[str, Any]) -> Iterator[tuple[str, str]]:
    device, host = start["chose"]["device"], start["host"]
    yield "device", f"{device['count']} × {device['kind']} (requested: {device['asked']})"
    yield "host", f"{host['system']}, {host['cores']} cores"
    if keys := start["command_line"]:
        yield "keys", " ".join(f"{key}={value}" for key, value in keys.items())
    for name, commit in start["commits"].items():
        changed = ", with uncommitted changes" if commit["is_changed"] else ""
        yield "commit", f"{commit['commit'][:12]} of {name}{changed}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())


def _step(run: Standing) -> str:
    return f"{run.step}/{'?' if run.steps is None else run.steps}"


def _number(value: float | None) -> str:
    return "" if value is None else number(value)
