"""Ctrl-C, SIGTERM, SIGHUP: the loop finishes its step and saves; before it, the process ends.

An exception that leaves a signal handler during a compilation crashes the process, and a handler
does not run at all while the compiler works. So the handlers do nothing, and a thread receives a
signal through the interpreter's wake-up descriptor the moment it arrives. Where a run has several
processes, signals come from the parent of each, and what one receives holds for all.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from windlass.processes.pipe import Pipe

# SIGHUP comes when a terminal or an ssh session is closed.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = "\x1b[?25h"
CLEAR_LINE = "\r\x1b[K"


class Signals:
    """The signal that was received, and the handling that is due now."""

    def __init__(self, line: Pipe | None = None):
        self.line = line  # to a parent, in its child
        self.began = time.time()  # of a program: before it imports what takes a while
        self.peers: Any = None  # the other processes of the run, where there are any
        self.who = ""  # what goes before a line of a process that is not the first
        self.stop: signal.Signals | None = None  # the loop ends after the step it is in
        self._phase: str | None = None
        self._waits, self._is_over = False, False
        self._interrupt: Callable[[], None] | None = None
        self._passes_on: Callable[[signal.Signals], Any] | None = None

    @contextmanager
    def listening(self) -> Iterator["Signals"]:
        """Handle signals in this block; elsewhere than in the main thread none can be."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        # Under nohup SIGHUP is ignored, and who asked for that wants the run to go on.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [n for n in HANDLED if n != signal.SIGHUP or not is_ignored]
        before = {number: signal.signal(number, _nothing) for number in handled}
        descriptor = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=[reads], daemon=True)
        watcher.start()
        if self.line is not None:
            threading.Thread(target=self._obey, args=[self.line.signals], daemon=True).start()
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
        """A named phase, for the line that says what was interrupted."""
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
            self._waits, self._phase = False, self._phase or "finishing"

    def finishes(self) -> None:
        """From here on all is saved, and a signal is only noted: the processes end together.

        One that left the others at once would be missed by them, and taken for lost.
        """
        self._waits = self._is_over = True

    @contextmanager
    def interrupts(self, callback: Callable[[], None]) -> Iterator[None]:
        """In this block Ctrl-C calls `callback`, in another thread, and ends nothing."""
        self._interrupt = callback
        try:
            yield
        finally:
            self._interrupt = None

    @contextmanager
    def passes_on(self, callback: Callable[[signal.Signals], Any]) -> Iterator[None]:
        """In this block signals are for another process."""
        self._passes_on = callback
        try:
            yield
        finally:
            self._passes_on = None

    def ends(self, step: int) -> bool:
        """True when the loop ends after this step; to be called after every step."""
        if self.peers is not None:
            # They are at different steps when one receives a signal, and stop after the same.
            number = self.peers.stop_after(step)
            self.stop = self.stop or number
            return number is not None
        return self.stop is not None

    def _obey(self, reads: int) -> None:
        """Handle what a parent passes on, and end when it is gone."""
        self._watch(reads)
        self._leave("its `windlass train` was killed", 1)

    def _watch(self, reads: int) -> None:
        while received := os.read(reads, 1):
            if received[0] in HANDLED:
                self._receive(signal.Signals(received[0]))

    def _receive(self, number: signal.Signals) -> None:
        if self._passes_on is not None:
            self._passes_on(number)
            return
        if self._interrupt is not None and number == signal.SIGINT:
            self._interrupt()
            return
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        if not self._waits:
            self._leave(f"{name} while {self._phase or 'starting'}: nothing was lost", 128 + number)
        if self.stop is not None and number == signal.SIGINT:
            again = f"{name} again: stopped at once; the last checkpoint is as it was"
            self._leave(again, 128 + number)
        self.stop = number
        if self.peers is not None:
            self.peers.ask_to_stop(number)
        now = "all is saved, the run ends" if self._is_over else "finishing this step, then saving"
        say(f"{self.who}{name}: {now}; Ctrl-C again stops at once")

    def _leave(self, text: str, code: int) -> None:
        say(self.who + text)
        clear()
        if self.peers is not None:
            self.peers.end(text, code)
            self.peers.part(code)
        os._exit(code)


def _nothing(number, frame) -> None:
    pass


def say(text: str) -> None:
    """A line for the user, whatever else is on the terminal."""
    try:
        if sys.stderr.isatty():
            sys.stderr.write("\r")
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody is reading any more, or the terminal was closed
        pass


def clear() -> None:
    """Leave a terminal as it was before a bar was drawn on it."""
    # A bar draws itself again below the text, hides the cursor, and keeps what is written to the
    # stream from getting through as it is.
    try:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), f"{CLEAR_LINE}{SHOW_CURSOR}".encode())
    except (OSError, ValueError):  # as in `say`
        pass
