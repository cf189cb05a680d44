"""Programs that are to be counted and not run, where what takes long to trace is only sketched."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto

import jax

from windlass.devices.axes import device, is_nvidia


class Sketch(Enum):
    """Form of a program that is traced."""

    NONE = auto()  # as it runs
    FORMULAS = auto()  # what a kernel computes, as plain formulas
    KERNELS = auto()  # kernels as they are called, by their inputs and outputs


_SKETCH = ContextVar("_SKETCH", default=Sketch.NONE)


@contextmanager
def sketched(*, kernels: bool = False) -> Iterator[None]:
    """Programs traced here have flash attention and random weights as their shapes alone.

    With `kernels` other kernels, too, where the device has them; else the formulas are in their
    place, as for whoever counts the FLOPs of a model.
    """
    before = _SKETCH.set(Sketch.KERNELS if kernels else Sketch.FORMULAS)
    try:
        yield
    finally:
        _SKETCH.reset(before)


def is_sketched() -> bool:
    return _SKETCH.get() is not Sketch.NONE


def on_gpu() -> bool:
    """Return True if what is traced here is to run in kernels on NVIDIA GPUs."""
    here = device()
    return is_nvidia(here.platform, here.device_kind) and _SKETCH.get() is not Sketch.FORMULAS


def on_one_gpu() -> bool:
    """Return True if what is traced here is to run on an NVIDIA GPU alone."""
    return on_gpu() and jax.sharding.get_abstract_mesh().size == 1
