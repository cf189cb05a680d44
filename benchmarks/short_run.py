"""A short run: `windlass train` in a process of its own, stopped once it has taken some steps."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WINDLASS = [sys.executable, "-m", "windlass"]
POLLED = 0.05  # seconds from a look for a step to the next
WRITTEN = 1.0  # seconds within which a run's records are on the disk


class Failed(Exception):
    """A run that ended before its steps were taken, with what it printed."""


class Records(NamedTuple):
    """Records of one start of a run."""

    began: float  # seconds since 1970, when the command was given
    metrics: list[dict[str, Any]]
    compiled: list[dict[str, Any]]
    phases: dict[str, float]  # seconds of each


def train(
    recipe: str | Path,
    folder: Path,
    cache: Path,
    *,
    keys: Sequence[str] = (),
    steps: int,
    saves: bool = True,
) -> Records:
    """Start a run, or go on with it, and stop it after so many steps, which it saves or loses."""
    words = [*WINDLASS, "train", str(recipe), f"run.dir={folder}", "telemetry.every=1", *keys]
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    began = time.time()
    with log.open("w") as output:
        variables = surroundings({"WINDLASS_CACHE": str(cache)})
        # In a group of its own: the process that trains is a child of the one that is started.
        process = subprocess.Popen(
            words, env=variables, stdout=output, stderr=output, start_new_session=True
        )
    while process.poll() is None and len(_since(began, metrics)) < steps:
        time.sleep(POLLED)
    if saves:
        process.send_signal(signal.SIGTERM)
    elif process.poll() is None:
        time.sleep(WRITTEN)
        os.killpg(process.pid, signal.SIGKILL)
    # 0: it was finished before
    if process.wait() not in (0, 128 + signal.SIGTERM) and (saves or process.poll() != -9):
        raise Failed(f"{' '.join(words)}\n{log.read_text()}")
    compiled = _since(began, folder / "compile.jsonl")
    return Records(began, _since(began, metrics), compiled, _phases(began, folder / "phases.jsonl"))


def surroundings(more: dict[str, str]) -> dict[str, str]:
    """Variables of a process that imports this checkout."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more


def _phases(began: float, file: Path) -> dict[str, float]:
    """Seconds of each phase since then, which a start that was killed may not have finished."""
    seconds: dict[str, float] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        piece = json.loads(line)
        if piece["began"] >= began - 1:  # the process knows when it began to a hundredth
            seconds[piece["phase"]] = seconds.get(piece["phase"], 0.0) + piece["seconds"]
    return seconds


def _since(began: float, file: Path) -> list[dict[str, Any]]:
    """Records that were written since then, but for a last line that is not finished."""
    written = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in written if line.endswith("\n")]
    return [record for record in records if record["time"] > began]
