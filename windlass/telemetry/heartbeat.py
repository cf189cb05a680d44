"""Heartbeat: a sign of life while nothing else is printed."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 5.0  # seconds of silence before the first sign


class Heartbeat:
    """Calls a function again and again from a thread of its own, between start and stop."""

    def __init__(self, beat: Callable[[], None], seconds: float):
        self._beat, self._seconds = beat, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._beat()


@dataclass
class Doing:
    """An activity, since when it goes on, and how long it took the last time."""

    name: str
    began: int | float
    last: int | float | None
    patience: int | float = 0  # seconds in which it need not be reported
    reported: int | float = 0  # time of the last report

    def after(self, seconds: int | float) -> str:
        last = f"; last time {clock(self.last)}" if self.last is not None else ""
        return f"{self.name}, {clock(seconds)}{last}"


def clock(seconds: int | float) -> str:
    """A time as a clock shows it: 1:05, 2:00:09."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
