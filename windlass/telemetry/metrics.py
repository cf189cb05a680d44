"""The numbers of a run: a file of them, and how fast it goes."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from windlass.errors import UserError

# JSON has no such numbers. Python reads these words back with `float`.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Metrics:
    """A file of records, one JSON object in a line, that only grows: `metrics.jsonl`.

    Each record is in the file when `write` returns, so that a killed run has lost none. Of several
    processes the first alone writes.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time):
        self.path, self._clock = Path(path), clock
        self._is_writer = jax.process_index() == 0
        # A line that a killed process left unfinished would spoil the next one.
        self.truncate()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._is_writer:
            return
        record = {"step": step, "time": round(self._clock(), 3)}
        record |= {name: _plain(value) for name, value in values.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def truncate(self, step: int | None = None) -> None:
        """Drop the records after a step: a run that goes on from there takes those steps again."""
        if self._is_writer:
            truncate(self.path, step)

    def last(self, name: str = "step") -> dict[str, Any] | None:
        """The newest record that has a value of this name."""
        records = read(self.path) if self.path.exists() else []
        return next((record for record in reversed(records) if name in record), None)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, but for a last line that is not finished."""
    records = []
    for number, line in enumerate(_finished(Path(path)), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # neither JSON nor UTF-8
            raise UserError(f"{path}, line {number}, is not JSON: {error}") from error
        records.append({name: _number(value) for name, value in record.items()})
    return records


def truncate(path: str | Path, step: int | None = None) -> None:
    """Drop a last line that is not finished, and every record after `step`.

    The file is replaced whole, so that being killed here loses nothing.
    """
    path = Path(path)
    if not path.exists():
        return
    lines = _finished(path)
    if step is not None:
        pairs = zip(lines, read(path), strict=True)
        lines = [line for line, record in pairs if record["step"] <= step]
    kept = b"".join(lines)
    if len(kept) == path.stat().st_size:
        return
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(kept)
    os.replace(partial, path)


class Meter:
    """How fast a run goes, from one reading to the next.

    Steps run on the device while Python is ahead of them, so read it, and pause it, only when the
    results of the last step are there.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | float,
        flops_per_step: int | None = None,
        peak_flops: float | None = None,  # in a second, of all devices together; None: not known
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_step, peak_flops
        self._clock = clock
        self._steps, self._since, self._paused = 0, clock(), 0.0

    def step(self) -> None:
        """One more step is done."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training: compiling, evaluating, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - began

    def read(self) -> dict[str, float]:
        """Speeds since the last reading; nothing where no step was taken."""
        now, steps = self._clock(), self._steps
        seconds = now - self._since - self._paused
        self._steps, self._since, self._paused = 0, now, 0.0
        if not steps or seconds <= 0:
            return {}
        speeds = {
            "step_seconds": seconds / steps,
            "tokens_per_second": self._tokens * steps / seconds,
        }
        if self._flops is not None and self._peak is not None:
            speeds["mfu"] = self._flops * steps / (seconds * self._peak)
        return speeds


def _finished(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int | None):
        return value
    value = value.item() if hasattr(value, "item") else value  # of an array
    if isinstance(value, float) and not math.isfinite(value):
        return next(word for word, same in _WORDS.items() if str(same) == str(value))
    return value


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value
