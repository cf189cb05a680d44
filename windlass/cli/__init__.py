"""The command line: parse, call, print."""

import sys

from windlass.processes.signals import Signals


def main() -> None:
    """Run the program with the words it was started with."""
    # Before anything that takes a while to import: a signal is heard from the first moment on.
    with Signals().listening() as signals:
        from windlass.cli.commands import run

        code = run(sys.argv[1:], signals)
    sys.exit(code)
