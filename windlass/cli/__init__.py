"""The command line: parse, call, print."""

import gc
import signal
import sys
from io import TextIOWrapper

from windlass.processes.garbage import uncollected
from windlass.processes.signals import Signals


def main() -> None:
    """Run the program with the words it was started with."""
    prepare_streams()
    # Where the program does not listen, in its first moment and its last, Ctrl-C ends it as SIGTERM
    # does, without a traceback of whatever was imported or closed.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before anything that takes a while to import: a signal is heard from the first moment on.
    with Signals().listening() as signals:
        with uncollected():
            from windlass.cli.commands import run

        code = run(sys.argv[1:], signals)
    # All that JAX made goes with the process: without the interpreter's last look at each object a
    # command that used it ends in a fifth of the time.
    gc.freeze()
    sys.exit(code)


def prepare_streams() -> None:
    """Have what an encoding cannot write, such as × in a C locale, written as its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # and not None, where it is closed
            stream.reconfigure(errors="backslashreplace")
