"""Goodput of a run: the share of its time that trained, by phase and over all of its starts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from windlass.telemetry.phases import END, FIRST, STEPPING, STEPS, PhasePiece

WAITING, REPEATED, STEADY = "waiting for data", "steps repeated", "steady steps"
TRAINED = (FIRST, STEADY)
# Kinds of time, in the order in which they are shown. Any other comes before the last.
ORDER = (
    *("import", "devices", "data", "initialise", "planning", "compile"),
    *(FIRST, STEADY, WAITING, "evaluation", "checkpoint", REPEATED, "other"),
)
Seconds = dict[str, float]


@dataclass(frozen=True)
class RunStart:
    """One start of a run: from its process' first moment to its last."""

    pieces: Sequence[PhasePiece]
    resumes_at: int | None  # of the next start that took steps; those after it were taken again
    is_running: bool

    @property
    def number(self) -> int:
        return self.pieces[0].start

    @property
    def began(self) -> float:
        return self.pieces[0].began

    @property
    def ended(self) -> float:
        return self.pieces[-1].ended

    @property
    def running(self) -> float:
        return self.ended - self.began

    @property
    def steps(self) -> tuple[int, int] | None:
        """Steps done before and after it; None where it took none."""
        taken = [piece for piece in self.pieces if piece.phase in STEPPING]
        return (taken[0].first, taken[-1].step) if taken else None

    @property
    def ending(self) -> str:
        last = self.pieces[-1]
        if self.is_running:
            return "running"
        return last.ending or f"killed ({last.phase})"

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds by kind, in order."""
        total: Seconds = {}
        for piece in self.pieces:
            for kind, seconds in self._kinds(piece):
                total[kind] = total.get(kind, 0.0) + seconds
        return _ordered(total)

    @property
    def trained(self) -> float:
        return sum(self.seconds.get(kind, 0.0) for kind in TRAINED)

    def _kinds(self, piece: PhasePiece) -> Iterable[tuple[str, float]]:
        if piece.phase == END:
            return
        if piece.phase not in STEPPING:
            yield piece.phase, piece.seconds
            return
        busy = piece.seconds - piece.waited
        kept = busy * self._kept(piece)
        yield STEADY if piece.phase == STEPS else FIRST, kept
        yield WAITING, piece.waited
        yield REPEATED, busy - kept

    def _kept(self, piece: PhasePiece) -> float:
        """The share of steps that no later start took again."""
        if self.resumes_at is None:
            return 1.0
        if piece.step == piece.first:  # between a save and the end, or killed in a step
            return 1.0 if self.pieces[-1].ending or piece.first < self.resumes_at else 0.0
        kept = min(piece.step, self.resumes_at) - piece.first
        return max(0, kept) / (piece.step - piece.first)


@dataclass(frozen=True)
class Goodput:
    """Time of a run over all of its starts."""

    starts: Sequence[RunStart]

    @property
    def seconds(self) -> Seconds:
        """Seconds by kind over all starts, in order."""
        total: Seconds = {}
        for start in self.starts:
            for kind, seconds in start.seconds.items():
                total[kind] = total.get(kind, 0.0) + seconds
        return _ordered(total)

    @property
    def running(self) -> float:
        """Seconds in which a process was there for the run."""
        return sum(start.running for start in self.starts)

    @property
    def gaps(self) -> list[float]:
        """Seconds between a start's end and the next."""
        pairs = zip(self.starts, self.starts[1:], strict=False)
        return [max(0.0, after.began - before.ended) for before, after in pairs]

    @property
    def downtime(self) -> float:
        """Seconds between starts."""
        return sum(self.gaps)

    @property
    def trained(self) -> float:
        """Seconds of steps that count, without waiting for data."""
        return sum(start.trained for start in self.starts)

    @property
    def share(self) -> float | None:
        """Goodput: the share of the running time that trained."""
        return self.trained / self.running if self.running else None

    @property
    def share_with_downtime(self) -> float | None:
        """The same of all time since the first start."""
        return self.trained / (self.running + self.downtime) if self.running else None

    @property
    def resumed_at(self) -> list[int]:
        """Steps from which later starts went on."""
        return [start.steps[0] for start in self.starts[1:] if start.steps is not None]

    @property
    def pace(self) -> float | None:
        """Seconds per step of the newest start with steps, evaluations and saves among them."""
        for start in reversed(self.starts):
            steady = [piece for piece in start.pieces if piece.phase == STEPS]
            if steady and (steps := steady[-1].step - steady[0].first):
                return (start.ended - steady[0].began) / steps
        return None

    def as_dict(self) -> dict[str, Any]:
        """JSON form; units are in the names."""
        return {
            "goodput": self.share,
            "goodput_with_downtime": self.share_with_downtime,
            "trained_seconds": self.trained,
            "running_seconds": self.running,
            "downtime_seconds": self.downtime,
            "phases_seconds": self.seconds,
            "starts": [
                {
                    "began": start.began,
                    "ended": start.ended,
                    "ending": start.ending,
                    "steps": start.steps,
                    "phases_seconds": start.seconds,
                }
                for start in self.starts
            ],
        }


def goodput(pieces: Iterable[PhasePiece], *, is_running: bool) -> Goodput:
    """Goodput of a run from its pieces; the last of its starts may be running."""
    grouped = [[*group] for _, group in groupby(pieces, key=lambda piece: piece.start)]
    starts: list[RunStart] = []
    resumes_at: int | None = None
    for group in reversed(grouped):
        start = RunStart(group, resumes_at, is_running and group is grouped[-1])
        if start.steps is not None:
            before = start.steps[0]
            resumes_at = before if resumes_at is None else min(before, resumes_at)
        starts.insert(0, start)
    return Goodput(starts)


def in_order(kinds: Iterable[str]) -> list[str]:
    """Kinds of time as they are shown, each once."""
    known = {kind: number for number, kind in enumerate(ORDER)}
    return sorted({*kinds}, key=lambda kind: (known.get(kind, len(ORDER) - 1.5), kind))


def _ordered(seconds: Seconds) -> Seconds:
    return {kind: seconds[kind] for kind in in_order(seconds) if seconds[kind] > 0}
