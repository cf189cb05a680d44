"""Ctrl-C and SIGTERM: the loop finishes its step and saves; before the loop, the process ends.

An exception that leaves a signal handler during a compilation crashes the process, and a handler
does not run at all while the compiler works. So the handlers do nothing, and a thread hears of a
signal through the interpreter's wake-up descriptor the moment it arrives.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEARD = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
CLEAR_LINE = "\r\x1b[K"


class Signals:
    """What was heard, and what to do about it now."""

    def __init__(self):
        self.stop: signal.Signals | None = None  # the loop ends after the step it is in
        self._phase: str | None = None
        self._waits = False
        self._interrupt: Callable[[], None] | None = None

    @contextmanager
    def listening(self) -> Iterator["Signals"]:
        """Hear signals in this block; elsewhere than in the main thread nothing can be heard."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        before = {number: signal.signal(number, _nothing) for number in HEARD}
        descriptor = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=[reads], daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writes)
            watcher.join()
            os.close(reads)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is going on, for the line that says what was interrupted."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def waits(self) -> Iterator[None]:
        """In this block a signal is only noted: the loop looks at `stop` between steps."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    @contextmanager
    def interrupts(self, heard: Callable[[], None]) -> Iterator[None]:
        """In this block Ctrl-C calls this, in another thread, and ends nothing."""
        self._interrupt = heard
        try:
            yield
        finally:
            self._interrupt = None

    def _watch(self, reads: int) -> None:
        while heard := os.read(reads, 1):
            if heard[0] in HEARD:
                self._heard(signal.Signals(heard[0]))

    def _heard(self, number: signal.Signals) -> None:
        if self._interrupt is not None and number == signal.SIGINT:
            self._interrupt()
            return
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        if not self._waits:
            _leave(f"{name} while {self._phase or 'starting'}: nothing was lost", number)
        if self.stop is not None and number == signal.SIGINT:
            _leave(f"{name} again: stopped at once; the last checkpoint is as it was", number)
        self.stop = number
        _say(f"{name}: finishing this step, then saving; Ctrl-C again stops at once")


def _nothing(number, frame) -> None:
    pass


def _say(text: str) -> None:
    try:
        if sys.stderr.isatty():
            sys.stderr.write("\r")
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (BrokenPipeError, ValueError):  # nobody is reading any more
        pass


def _leave(text: str, number: signal.Signals) -> None:
    _say(text)
    if sys.stderr.isatty():
        # A bar draws itself again below the text, hides the cursor, and keeps what is written to
        # the stream from getting through as it is.
        os.write(2, f"{CLEAR_LINE}{SHOW_CURSOR}".encode())
    os._exit(128 + number)
