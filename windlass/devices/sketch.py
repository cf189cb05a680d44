"""Programs that are to be counted and not run, where what takes long to trace is only sketched."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_SKETCHED = ContextVar("_IS_SKETCHED", default=False)


@contextmanager
def sketched() -> Iterator[None]:
    """Programs traced here have flash attention and random weights as their shapes alone."""
    before = _IS_SKETCHED.set(True)
    try:
        yield
    finally:
        _IS_SKETCHED.reset(before)


def is_sketched() -> bool:
    return _IS_SKETCHED.get()
