"""Metrics of a run: a file of records, and a throughput meter."""

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from windlass import files
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.processes import hosts
from windlass.telemetry.tensorboard import Events
from windlass.units import counted

T = TypeVar("T")

# Fields of a record, besides the parts of the loss, which an objective names, and `validation_`
# with a name for what was measured on held-out rows.
MEANINGS = {
    "step": "optimizer steps done",
    "time": "seconds since 1970, when the record was written",
    "loss": "training loss, averaged over the tokens of the step; nats per token",
    "gradient_norm": "global norm of the gradient, before clipping",
    "learning_rate": "of the step, by the schedule",
    "loss_scale": "of float16: loss scale of the next step",
    "overflows": "of float16: steps skipped so far because a gradient overflowed",
    "token_hash": "hash of all tokens consumed so far, in order: the same on any devices and mesh, "
    "with any accumulation and restarts",
    "tokens": "tokens trained on so far: steps × tokens of an average batch, without padding",
    "tokens_per_second": "throughput over all devices, in the loss or not, without padding",
    "samples_per_second": "sequences per second, over all devices",
    "step_ms": "milliseconds per step since the last record, without evaluations and saves",
    "data_wait_ms": "milliseconds per step in which the device was idle for want of a batch",
    "data_part": "of a stream: the part that the step was trained on, from 0",
    "data_ahead_tokens": "of a stream: tokens that have arrived and are not trained on yet",
    "memory_bytes": "in use on the fullest device of this host; on a CPU, by the process",
    "peak_memory_bytes": "peak of the same since the process began",
    "mfu": "model FLOPs utilization: model FLOP/s as a share of the devices' peak; absent where "
    "the peak is not known",
}

# Causes of time that is lost to training, where it could be saved.
DATA, CHECKPOINT, RECOMPILE, LOGGING = "data", "checkpoint", "recompile", "logging"
READINGS = 1000  # of a meter, of which it has the median: a run may take a million steps

# JSON has no such numbers. Python reads these words back with `float`.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Metrics:
    """A file of records, one JSON object in a line, that only grows: `metrics.jsonl`.

    Each record is in the file when `write` returns, so that a killed run has lost none, and beside
    it in a file for TensorBoard. Of several processes the first alone writes.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time):
        self.path, self._clock = Path(path), clock
        self._events = Events(self.path.parent)
        self._is_writer = hosts.is_first()
        self.mended = mend(self.path) if self._is_writer else None  # what there is to say of it

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._is_writer:
            return
        record = {"step": step, "time": round(self._clock(), 3)}
        record |= {name: plain(value) for name, value in values.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        numbers = {name: _number(value) for name, value in record.items()}
        self._events.write(step, record["time"], numbers)

    def text(self, step: int, name: str, text: str) -> None:
        """Something to read beside the numbers, in TensorBoard alone."""
        if self._is_writer:
            self._events.text(step, round(self._clock(), 3), name, text)

    def hyperparameters(self, step: int, values: Mapping[str, Any]) -> None:
        """Hyper-parameters by their full keys, in TensorBoard alone."""
        if self._is_writer:
            self._events.hyperparameters(step, round(self._clock(), 3), values)

    def end(self, step: int, is_finished: bool) -> None:
        """The end of a start, in TensorBoard alone."""
        if self._is_writer:
            self._events.end(step, round(self._clock(), 3), is_finished)

    def truncate(self, step: int) -> None:
        """Drop the records after a step: a run that goes on from there takes those steps again."""
        if self._is_writer:
            truncate(self.path, step)
            self._events.begin(step, self._clock())

    def read(self) -> list[dict[str, Any]]:
        """All records so far; none where another process writes them."""
        return read(self.path) if self._is_writer and self.path.exists() else []

    def last(self, name: str = "step") -> dict[str, Any] | None:
        """The newest record that has a value of this name."""
        return last(self.path, name)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, but for a last line that is not finished."""
    lines = enumerate(_finished(Path(path)), start=1)
    return [_record(line, f"{path}, line {number},") for number, line in lines]


def by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with one for each step, of which an evaluation is a record of its own."""
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        step = record["step"]
        rows[step] = rows.get(step, {}) | record
    return list(rows.values())


def last(path: str | Path, name: str = "step") -> dict[str, Any] | None:
    """The newest record of a file that has a value of this name; None where none has."""
    path, key = Path(path), json.dumps(name).encode()
    lines = reversed(_finished(path)) if path.exists() else ()
    # Only those lines are parsed that may have it: a long run has a million of them.
    for line in lines:
        if key in line and name in (record := _record(line, path)):
            return record
    return None


def mend(path: Path) -> str | None:
    """Keep the records of a file alone, and what else it was beside it; gives what there is to say.

    A line that a killed process left unfinished would spoil the next one, and goes without a word.
    """
    if path.is_dir():
        place = files.put_aside(path)
        return f"{path} was a folder, which is now {place}; the records begin anew"
    lines = _finished(path) if path.exists() else []
    good = [line for line in lines if _is_record(line)]
    if len(good) < len(lines):
        place = files.aside(path)
        files.write(place, path.read_bytes())
        files.write(path, b"".join(good))
        bad = counted(len(lines) - len(good), "line")
        return f"{path} has {bad} without a record; the others are kept, and all are in {place}"
    truncate(path)
    return None


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
    content = b"".join(lines)
    if len(content) == path.stat().st_size:
        return
    files.write(path, content)


@runtime_checkable
class Pending(Protocol):
    """A device array, finished or still being computed."""

    def is_ready(self) -> bool: ...


class Reading(NamedTuple):
    """Wall time of some steps, evaluations apart, and the part of it that each cause took."""

    steps: int
    seconds: float
    lost: Mapping[str, float]

    def share(self, cause: str) -> float:
        return self.lost.get(cause, 0.0) / self.seconds


class Meter:
    """Throughput meter: speeds from one reading to the next, and the totals of a run.

    Steps run on the device while Python is ahead of them, so read it, and pause it, only when the
    results of the last step are there.
    """

    def __init__(
        self,
        *,
        rows_per_step: int,
        tokens_per_step: int | float | None,  # None: rows have no tokens
        read_per_step: int | float | None = None,  # where not all are trained on; None: they are
        flops_per_step: int | None = None,
        peak_flops: float | None = None,  # in a second, of all devices together; None: not known
        compiled: Callable[[], float] = lambda: 0.0,  # seconds of compilation so far
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rows, self._tokens = rows_per_step, tokens_per_step
        self._read = tokens_per_step if read_per_step is None else read_per_step
        self.flops_per_step, self._peak, self._clock = flops_per_step, peak_flops, clock
        self._steps, self._since, self._paused, self._waited = 0, clock(), 0.0, 0.0
        self._lost: dict[str, float] = defaultdict(float)  # by cause, since the last reading
        self._compiled, self._known = compiled, compiled()
        self._result: Pending | None = None
        self.reading: Reading | None = None  # the last one
        self.steps, self.seconds = 0, 0.0  # in all, up to the last reading
        self.waited = 0.0  # seconds for batches, in all
        # Seconds of a step, and how many took them; the first reading is of the start.
        self._first: list[tuple[float, int]] = []
        self._readings: deque[tuple[float, int]] = deque(maxlen=READINGS)

    def next(self, batches: Iterator[T]) -> T:
        """The next batch; the time it took to come, where the device had nothing else to do."""
        began = self._clock()
        batch = next(batches)
        if self._result is None or self._result.is_ready():
            took = self._clock() - began
            self._waited, self.waited = self._waited + took, self.waited + took
        return batch

    def step(self, result: Pending | None = None) -> None:
        """One more step is on its way; it is done when its result is ready."""
        self._steps, self._result = self._steps + 1, result

    @contextmanager
    def paused(self, cause: str | None = None) -> Iterator[None]:
        """Time that is not training: compiling, evaluating, saving; lost where it has a cause."""
        began, compiled = self._clock(), self._compiled()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self._paused += seconds
            self._known += self._compiled() - compiled  # what is compiled here, is for this
            if cause is not None:
                self._lost[cause] += seconds

    @contextmanager
    def losing(self, cause: str) -> Iterator[None]:
        """Time of the steps that a cause takes, with the device idle."""
        began = self._clock()
        try:
            yield
        finally:
            self._lost[cause] += self._clock() - began

    def read(self) -> dict[str, float]:
        """Speeds since the last reading; nothing where no step was taken."""
        now, steps, waited = self._clock(), self._steps, self._waited
        seconds = now - self._since - self._paused
        lost = self._take_lost(waited)
        self._steps, self._since, self._paused, self._waited = 0, now, 0.0, 0.0
        if not steps or seconds <= 0:
            return {}
        self.reading = Reading(steps, seconds + lost[CHECKPOINT], lost)
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds
        (self._readings if self._first else self._first).append((seconds / steps, steps))
        read = {} if self._read is None else {"tokens_per_second": self._read * steps / seconds}
        speeds = read | {
            "samples_per_second": self._rows * steps / seconds,
            "step_ms": 1000 * seconds / steps,
            "data_wait_ms": 1000 * waited / steps,
        }
        if self.flops_per_step is not None and self._peak is not None:
            speeds["mfu"] = self.flops_per_step * steps / (seconds * self._peak)
        return speeds

    def _take_lost(self, waited: float) -> dict[str, float]:
        """Seconds by cause since the last reading."""
        lost, compiled = self._lost, self._compiled()
        lost[DATA], lost[RECOMPILE] = waited, compiled - self._known
        self._lost, self._known = defaultdict(float), compiled
        return lost

    @property
    def median(self) -> float | None:
        """Median step time in seconds; the first reading counts only alone."""
        readings = sorted(self._readings or self._first)
        half, so_far = sum(steps for _, steps in readings) / 2, 0
        for seconds, steps in readings:
            so_far += steps
            if so_far >= half:
                return seconds
        return None

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of a median step, in tokens read."""
        return self._read and self.median and self._read / self.median

    @property
    def utilization(self) -> float | None:
        """MFU of a median step; None where the peak is not known."""
        if self.flops_per_step is None or self._peak is None or self.median is None:
            return None
        return self.flops_per_step / (self.median * self._peak)

    def tokens(self, steps: int) -> int | None:
        """Number of tokens that `steps` train on; None where rows have no tokens."""
        return None if self._tokens is None else round(self._tokens * steps)


def _record(line: bytes, where: str | Path) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:  # neither JSON nor UTF-8
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is no record: it has no names")
    return {name: _number(value) for name, value in record.items()}


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(_record(line, "").get("step"), int)
    except UserError:
        return False


def _finished(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def plain(value: Any) -> Any:
    """A number as JSON can hold it."""
    if isinstance(value, str | bool | int | None):
        return value
    value = value.item() if hasattr(value, "item") else value  # of an array
    if isinstance(value, float) and not math.isfinite(value):
        return next(word for word, same in _WORDS.items() if str(same) == str(value))
    return value


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value
