"""Shared clock: the time that all processes of a run agree on."""

import time
from collections.abc import Callable

from windlass.config import Every
from windlass.processes import hosts

STEPS = 10  # between two looks at the clock of another process


class Clock:
    """Clock in seconds; of several processes, that of the first, broadcast at steps that all know.

    Nothing is broadcast where no interval is one of time.
    """

    def __init__(self, *intervals: Every | None, clock: Callable[[], float] = time.monotonic):
        self._clock, self._now = clock, 0.0
        is_timed = any(every is not None and every.is_timed for every in intervals)
        self._is_broadcast = is_timed and hosts.count() > 1
        self._look()

    def __call__(self) -> float:
        return self._now if hosts.count() > 1 else self._clock()

    def step(self, done: int) -> None:
        """To be called after each step."""
        if done % STEPS == 0:
            self._look()

    def _look(self) -> None:
        if self._is_broadcast:
            self._now = hosts.broadcast("clock", self._clock)
