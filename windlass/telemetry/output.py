"""Standard output that outlives its reader."""

import io
import os
from collections.abc import Callable
from typing import Any, TextIO


class LastingOutput:
    """A text stream that drops what nobody can read any more.

    A pipe's reader may leave (`| head`), a terminal be closed, the disk of a log be full: EPIPE,
    EIO and ENOSPC of a line for people are no reason to end a run.
    """

    def __init__(self, stream: TextIO | None):  # None: it was closed before this began
        self._stream, self.is_lost = stream or io.StringIO(), stream is None

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, call: Callable[[], object]) -> None:
        if self.is_lost:
            return
        try:
            call()
        except BlockingIOError:  # the reader is there, and slow: it misses what does not fit
            return
        except OSError:
            self.is_lost = True
            # What is still in its buffer would fail again, when the process ends at the latest.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
