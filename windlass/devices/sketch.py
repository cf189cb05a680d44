"""Programs that are to be counted and not run, where what takes long to trace is only sketched."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from windlass.devices.axes import device, is_nvidia

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


def on_gpu() -> bool:
    """Return True if what is traced here is to run on NVIDIA GPUs."""
    here = device()
    return is_nvidia(here.platform, here.device_kind) and not is_sketched()


def on_one_gpu() -> bool:
    """Return True if what is traced here is to run on an NVIDIA GPU alone."""
    return on_gpu() and jax.sharding.get_abstract_mesh().size == 1
