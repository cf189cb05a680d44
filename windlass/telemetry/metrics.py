"""The numbers of a run: a file of them, and how fast it goes."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from windlass.devices.chips import find
from windlass.errors import UserError

# JSON has no such numbers. Python reads these words back with `float`.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Metrics:
    """A file of records, one JSON object in a line, that only grows: `metrics.jsonl`.

    Each record is in the file when `write` returns, so that a killed run has lost none. Of several
    processes the first alone writes.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time):
        self._clock, self._file = clock, None
        if jax.process_index() == 0:
            # A line that a killed process left unfinished would spoil the next one.
            truncate(path)
            self._file = open(path, "a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        record = {"step": step, "time": round(self._clock(), 3)}
        record |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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

    A run that goes on from a checkpoint takes the steps after it again. The file is replaced whole,
    so that being killed here loses nothing.
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

    Steps run on the device while Python is ahead of them, so read it, and set it aside, only when
    the results of the last step are there.
    """

    def __init__(
        self,
        *,
        steps: int,  # in the whole run
        tokens_per_step: int,
        flops_per_step: int | None = None,
        peak_flops: float | None = None,  # in a second, of all devices together; None: not known
        clock: Callable[[], float] = time.monotonic,
    ):
        self._steps, self._tokens, self._clock = steps, tokens_per_step, clock
        self._flops, self._peak = flops_per_step, peak_flops
        self._step, self._since, self._aside = 0, clock(), 0.0

    def start(self, step: int) -> None:
        """Count from here: so many steps are done."""
        self._step, self._since, self._aside = step, self._clock(), 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that is not training: compiling, evaluating, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside += self._clock() - began

    def read(self, step: int) -> dict[str, float]:
        """Speeds since the last reading, and the seconds that are left at that speed."""
        done = step - self._step
        seconds = self._clock() - self._since - self._aside
        self.start(step)
        if done <= 0 or seconds <= 0:
            return {}
        each = seconds / done
        speeds = {
            "step_seconds": each,
            "tokens_per_second": self._tokens / each,
            "seconds_left": each * max(0, self._steps - step),
        }
        if self._flops is not None and self._peak is not None:
            speeds["mfu"] = self._flops / (each * self._peak)
        return speeds


def peak_flops(device_kinds: Iterable[str], dtype: str) -> float | None:
    """What devices of these names can do in a second, or None where that is not known of one."""
    chips = [find(kind) for kind in device_kinds]
    peaks = [None if chip is None else chip.peak.get(dtype) for chip in chips]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None


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
