"""Phases of a run: its time by kind of work, over all starts, in a file of its folder."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.processes import hosts
from windlass.telemetry.metrics import mend, read

IMPORT, FIRST, STEPS, OTHER = "import", "first step", "steps", "other"
STEPPING = (FIRST, STEPS)  # phases in which steps are taken
END = "end"  # of a start that was not killed
Ending = Literal["finished", "stopped", "failed"]

# Seconds from one write to the next: a share of the start so far, within bounds. That much of its
# last piece a killed start may lose.
SHARE, OFTEN, SELDOM = 1 / 200, 0.2, 30.0


@dataclass
class PhasePiece:
    """Uninterrupted time of a start in one phase."""

    start: int  # of the run, from 1
    phase: str
    began: float  # in seconds since 1970
    seconds: float
    first: int  # steps done when it began
    step: int  # and when it ended
    waited: float  # seconds of it in which the device had no batch
    ending: str = ""  # of the start, where this is its end

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    def line(self) -> str:
        record = {"step": self.step, "start": self.start, "phase": self.phase}
        record |= {"began": round(self.began, 3), "seconds": round(self.seconds, 3)}
        if self.phase in STEPPING:
            record |= {"first": self.first, "waited": round(self.waited, 3)}
        if self.ending:
            record["ending"] = self.ending
        return json.dumps(record) + "\n"


class Phases:
    """Log of the phases of one start, which follow each other without a gap: `phases.jsonl`.

    A line is a piece of one phase. A thread writes those that ended and, in place, the one that
    goes on, so that a killed start loses little and the loop waits for no file. Of several
    processes the first alone writes.
    """

    def __init__(self, began: float | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._clock, self._offset = clock, time.time() - clock()
        self._lock = threading.Lock()
        self._start, self._step, self._waited = 1, 0, 0.0
        self._began = self._now() if began is None else began
        self._ended: list[PhasePiece] = []  # and not written yet
        self._outer: list[str] = []
        self._piece = self._new(IMPORT, self._began)
        self._turn(OTHER)
        self._file: int | None = None
        self._place = 0  # in the file, of the first that is not written for good
        self._is_kept = False
        self._ending: Ending | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A phase; what it interrupts goes on after it."""
        self._outer.append(self._piece.phase)
        self._turn(phase)
        try:
            yield
        finally:
            self._turn(self._outer.pop())

    def stepping(self, first: int) -> AbstractContextManager[None]:
        """The phase of steps, of which `first` are done; the first one is a phase of its own."""
        self._step = first
        return self(FIRST)

    def stepped(self, step: int, waited: float) -> None:
        """One more step is taken, with the seconds that the start waited for batches so far."""
        self._step, self._waited = step, waited
        if self._piece.phase == FIRST:
            self._turn(STEPS)

    def keep(self) -> None:
        """The start trains: its time is the run's, however it ends."""
        self._is_kept = True

    def end(self, ending: Ending) -> None:
        self._ending = ending

    @contextmanager
    def recording(self, path: Path, warn: Callable[[str], None]) -> Iterator[None]:
        """A block in which phases are written; a start that is refused in it leaves none."""
        if not hosts.is_first():
            yield
            return
        if (mended := mend(path)) is not None:
            warn(mended)
        before = path.stat().st_size if path.exists() else 0
        self._open(path, before)
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=[stop], name="phases", daemon=True)
        thread.start()
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            if not is_whole:
                self._ending = self._ending or "failed"
            stop.set()
            thread.join()
            self._close(path, before)

    def _open(self, path: Path, place: int) -> None:
        former = pieces(path)
        with self._lock:
            self._start = former[-1].start + 1 if former else 1
            for piece in (*self._ended, self._piece):
                piece.start = self._start
        self._file, self._place = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), place

    def _close(self, path: Path, before: int) -> None:
        self._turn(END)
        self._piece.ending = self._ending or "stopped"
        self._write()
        assert self._file is not None
        if not self._is_kept:
            os.ftruncate(self._file, before)
        os.close(self._file)
        if not self._is_kept and not before:
            path.unlink(missing_ok=True)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(min(SELDOM, max(OFTEN, SHARE * (self._now() - self._began)))):
            self._write()

    def _write(self) -> None:
        """Write the pieces that ended, and after them the one that goes on."""
        assert self._file is not None
        with self._lock:
            self._extend()
            ended, self._ended = self._ended, []
            now = self._piece.line()
        done = "".join(piece.line() for piece in ended).encode()
        text = done + now.encode()
        try:
            os.pwrite(self._file, text, self._place)
            os.ftruncate(self._file, self._place + len(text))
        except OSError:  # of a full disk, which the run reports when it saves; tried again
            self._ended = ended + self._ended
        else:
            self._place += len(done)

    def _turn(self, phase: str) -> None:
        with self._lock:
            self._extend()
            piece = self._piece
            if piece.seconds >= 0.001 or piece.step > piece.first:
                self._ended.append(piece)
                self._piece = self._new(phase, piece.ended)
            else:
                self._piece = self._new(phase, piece.began)

    def _extend(self) -> None:
        """The piece that goes on, up to now."""
        piece = self._piece
        piece.seconds = max(0.0, self._now() - piece.began)
        if piece.phase in STEPPING:
            piece.step, piece.waited = self._step, self._waited - self._waited_before

    def _new(self, phase: str, began: float) -> PhasePiece:
        self._waited_before = self._waited
        return PhasePiece(self._start, phase, began, 0.0, self._step, self._step, 0.0)

    def _now(self) -> float:
        return self._clock() + self._offset


def pieces(path: Path) -> list[PhasePiece]:
    """The pieces of a run, of all its starts, in order; none where it has noted none."""
    return [*filter(None, map(_piece, read(path) if path.is_file() else ()))]


def _piece(record: dict[str, Any]) -> PhasePiece | None:
    """PhasePiece of a record; None where somebody edited it."""
    whole = {"first": record.get("step"), "waited": 0.0, "ending": "", **record}
    kinds = {"start": int, "phase": str, "began": float, "seconds": float, "first": int}
    kinds |= {"step": int, "waited": float, "ending": str}
    if not all(isinstance(whole.get(name), kind) for name, kind in kinds.items()):
        return None
    return PhasePiece(**{name: whole[name] for name in kinds})
