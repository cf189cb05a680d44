"""The child that trains, of a `windlass train` whose run has several processes."""

import os
import sys
from functools import partial
from typing import Any, TextIO

from windlass.cli import prepare_streams
from windlass.processes.garbage import uncollected
from windlass.processes.pipe import Pipe
from windlass.processes.signals import Signals


def main() -> None:
    """Run the program with the words that its parent was started with."""
    prepare_streams()
    reads, writes, log, *words = sys.argv[1:]
    pipe = Pipe(int(reads), int(writes), log)
    for descriptor in (pipe.signals, pipe.facts):
        os.set_inheritable(descriptor, False)
    sys.stdout, sys.stderr = _apart(sys.stdout, log), _apart(sys.stderr, log)
    with Signals(pipe).listening() as signals:
        sys.excepthook = partial(_fail, signals)
        with uncollected():
            from windlass.cli.commands import run

        code = run(words, signals)
    if signals.peers is not None and signals.peers.is_over:
        signals.peers.part(code)  # not to wait for processes that end otherwise
    sys.exit(code)


def _fail(signals: Signals, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    sys.__excepthook__(kind, error, trace)
    if signals.peers is not None:
        signals.peers.part(1)


def _apart(stream: TextIO, log: str) -> TextIO:
    """A stream to where this one leads, which is left to libraries that print by themselves."""
    stream.flush()
    own = os.dup(stream.fileno())
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, stream.fileno())
    os.close(file)
    return open(own, "w", encoding=stream.encoding, errors=stream.errors, buffering=1)


if __name__ == "__main__":
    main()
