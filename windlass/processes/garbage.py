"""Python's garbage collection, put off where much is made that stays."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Defer Python's garbage collection to the end."""
    # Among all that is imported, one collection takes as long as a quarter of a trace.
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
