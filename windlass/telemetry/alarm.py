"""The throughput alarm: one warning of a run that is slower than it should be, with the cause."""

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from windlass import units
from windlass.telemetry import Alarm
from windlass.telemetry.metrics import CHECKPOINT, DATA, LOGGING, RECOMPILE, Reading

RECENT, SHORTEST = 5, 5.0  # readings and seconds that are steady throughput
REMEMBERED = 1000  # readings, among which the last two stalls by one cause are looked for
STALL = 0.1  # of a reading's time, from which on a cause is a stall
MOST = 0.5  # of the time that is missing, from which on one cause explains it
PLANNED = 0.5  # of the throughput that is planned, below which there is an alarm

CAUSES = {
    DATA: "waiting for data",
    CHECKPOINT: "saving checkpoints",
    RECOMPILE: "compiling programs again",
    LOGGING: "logging",
}
ADVICE = {
    DATA: "more data.workers or a larger data.prefetch may help, and a source that is near",
    CHECKPOINT: "a larger checkpoint.every or a faster disk under run.dir would help",
    RECOMPILE: "compile.jsonl names the argument that changes, and train.strict=true ends a run "
    "at the first time",
    LOGGING: "a larger telemetry.every, a faster disk under run.dir or output to a file would help",
}


class Expected(NamedTuple):
    """Expected time of a step, the longest without an alarm, and where they come from."""

    seconds: float
    longest: float
    source: str

    @staticmethod
    def of(alarm: Alarm, tokens: float | None, planned: float | None) -> "Expected | None":
        """By the recipe or by the plan's seconds of a step; None where there is no alarm."""
        floor = alarm.tokens_per_second
        if floor is not None:
            if not floor or not tokens:
                return None
            return Expected(tokens / floor, tokens / floor, f"alarm.tokens_per_second ({floor:g})")
        if not planned:
            return None
        what = units.seconds(planned) if not tokens else f"{units.count(tokens / planned)} tok/s"
        return Expected(planned, planned / PLANNED, f"half the speed of the plan ({what})")


class ThroughputAlarm:
    """Watch over the readings of a run, for a warning as soon as steady throughput is too low.

    Low throughput has to last: a single stall is none of its concern, however long it is. A cause
    counts where it stalls the run again and again, over a whole time from one stall to the next.
    """

    def __init__(self, expected: Expected | None, tokens: float | None):
        self.expected, self._tokens = expected, tokens
        self._readings: deque[Reading] = deque(maxlen=REMEMBERED)
        self._has_begun, self._has_warned = False, False

    def read(self, reading: Reading) -> str | None:
        """A warning, once; the first reading is of the start, and does not count."""
        if self.expected is None or self._has_warned:
            return None
        if self._has_begun:
            self._readings.append(reading)
        self._has_begun = True
        recent = self._recent()
        warning = None if recent is None else self._warning(recent, self.expected)
        self._has_warned = warning is not None
        return warning

    def _recent(self) -> list[Reading] | None:
        """The last readings, as many as are steady; None before there are so many."""
        recent: list[Reading] = []
        for reading in reversed(self._readings):
            recent.append(reading)
            if len(recent) >= RECENT and _seconds(recent) >= SHORTEST:
                return recent[::-1]
        return None

    def _warning(self, recent: Sequence[Reading], expected: Expected) -> str | None:
        cause = _cause(recent, expected)
        if cause is None:
            typical = statistics.median(one.seconds / one.steps for one in recent)
            return self._text(recent, None, expected) if typical > expected.longest else None
        stalls = [i for i, one in enumerate(self._readings) if one.share(cause) > STALL]
        if len(stalls) < 2:
            return None
        first = min(len(self._readings) - len(recent), stalls[-2] + 1)
        whole = [*self._readings][first:]
        slow = _seconds(whole) > _steps(whole) * expected.longest
        return self._text(whole, cause, expected) if slow else None

    def _text(self, readings: Sequence[Reading], cause: str | None, expected: Expected) -> str:
        steps, seconds = _steps(readings), _seconds(readings)
        pace = f"{units.seconds(seconds / steps)} per step"
        if self._tokens:
            pace = f"{units.count(self._tokens * steps / seconds)} tok/s"
        low = f"throughput is {pace} over the last {steps} steps, below {expected.source}"
        shares = {name: _lost(readings, name) / seconds for name in CAUSES}
        if cause is not None:
            return f"{low}: {shares[cause]:.0%} of the time is {CAUSES[cause]}; {ADVICE[cause]}"
        spent = ", ".join(f"{CAUSES[name]} {share:.0%}" for name, share in shares.items())
        return (
            f"{low}, and the steps themselves are slow ({spent}): another program may use the "
            "device; profile.steps shows the operations that take the time"
        )


def _cause(readings: Sequence[Reading], expected: Expected) -> str | None:
    """The cause of most of the time that is missing; None where no cause is."""
    missing = _seconds(readings) - _steps(readings) * expected.seconds
    cause = max(CAUSES, key=lambda name: _lost(readings, name))
    lost = _lost(readings, cause)
    return cause if lost > 0 and lost >= MOST * missing else None


def _lost(readings: Sequence[Reading], cause: str) -> float:
    return sum(one.lost.get(cause, 0.0) for one in readings)


def _seconds(readings: Sequence[Reading]) -> float:
    return sum(one.seconds for one in readings)


def _steps(readings: Sequence[Reading]) -> int:
    return sum(one.steps for one in readings)
