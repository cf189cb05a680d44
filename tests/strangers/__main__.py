"""`windlass` with the strangers: `python -m tests.strangers train RECIPE`."""

import sys

import tests.strangers  # noqa: F401
from windlass.cli import main

if __name__ == "__main__":
    sys.exit(main())
