"""Preallocation: XLA takes most of a GPU's memory for itself when the first array is put there."""

import importlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from windlass.processes.exclusive import EXCLUSIVE

KERNELS = "jax.experimental.pallas.triton"  # what kernels are made with


def preallocate(devices: Sequence[Any]) -> None:
    """Start preallocating memory of those that are GPUs of this process: seconds, without Python.

    Whoever runs a program or puts an array there waits for it.
    """
    here = [one for one in devices if one.process_index == jax.process_index()]
    if any(one.platform == "gpu" for one in here):
        threading.Thread(target=_preallocate, args=(here,), name="preallocation").start()


def _preallocate(devices: Sequence[Any]) -> None:
    with EXCLUSIVE, ThreadPoolExecutor(len(devices)) as pool:
        for device in devices:
            pool.submit(_put, device)
        importlib.import_module(KERNELS)  # meanwhile


def _put(device: Any) -> None:
    with suppress(JaxRuntimeError):  # the run's first array raises it again
        jax.device_put(np.zeros(1), device).block_until_ready()
