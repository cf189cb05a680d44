"""Arrival of parts: a thread makes the next one while a run trains on the one before."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from windlass.hub.download import Stopped

T = TypeVar("T")
LATE = 10.0  # seconds of waiting for a part, after which that is reported; then twice as long
JOIN = 10.0  # seconds that the thread gets to end


class Arrivals(Generic[T]):
    """Parts by number, made in a thread as they are requested, and handed over once.

    `make` gives a part, or None behind the end of the stream; what it raises is raised again
    where the part is waited for, so that a run trains on what it has until then.
    """

    def __init__(self, make: Callable[[int], T | None], waiting: Callable[[int], None]):
        self._make, self._waiting = make, waiting
        self._requested: list[int] = []
        self._made: dict[int, T | None] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="arrivals")
        self._thread.start()

    def request(self, number: int) -> None:
        """Have a part made; at once, where nothing was requested before it."""
        with self._changed:
            if number not in self._made and number not in self._requested:
                self._requested.append(number)
                self._changed.notify_all()

    def take(self, number: int) -> T | None:
        """A part, waited for where it is not there yet."""
        self.request(number)
        patience = LATE
        with self._changed:
            while number not in self._made:
                if self._error is not None:
                    raise self._error
                if self._is_closed:
                    raise Stopped
                if not self._changed.wait(patience):
                    self._waiting(number)
                    patience *= 2
            return self._made.pop(number)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(JOIN)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._requested and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                number = self._requested[0]
            try:
                made = self._make(number)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._requested.remove(number)
                self._made[number] = made
                self._changed.notify_all()
