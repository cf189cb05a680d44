"""Processes that make batches, beside the one that trains."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np

from windlass.errors import UserError
from windlass.processes.signals import HANDLED

Make = Callable[..., dict[str, np.ndarray]]  # of row numbers, their epochs and a seed

_rows: Any = None  # in a worker: what it makes batches of


@contextmanager
def making(rows: Any, workers: int) -> Iterator[Make]:
    """A pool of worker processes; yields the function that makes a batch of row numbers in one.

    They are started anew and not forked: a fork of a process that holds an accelerator may hang.
    They import no JAX, and what they make is plain arrays, placed by the caller.
    """
    if not workers:
        yield rows.batch
        return
    try:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (rows,))
    except OSError as error:
        raise UserError(
            f"data.workers is {workers}, and no processes can be started here: {error.strerror}; "
            "they need semaphores in /dev/shm. data.workers=0 needs no processes"
        ) from None

    def make(*drawn: Any) -> dict[str, np.ndarray]:
        try:
            with _signals_blocked():  # it may start a worker
                future = pool.submit(_batch, *drawn)
            return future.result()
        except BrokenProcessPool:
            raise UserError(
                f"data.workers is {workers}, and one of these processes ended. A script that "
                'trains needs `if __name__ == "__main__":` around its calls, or they are made '
                "again in every worker; a machine out of memory ends them too. "
                "data.workers=0 needs no processes"
            ) from None

    try:
        yield make
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals that stop a run in this thread, and for good in a process it starts."""
    # Ctrl-C, or its end, reaches every process of a terminal, one that still imports too; when to
    # stop is for the one that trains to say.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(rows: Any) -> None:
    global _rows
    _rows = rows
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _batch(*drawn: Any) -> dict[str, np.ndarray]:
    return _rows.batch(*drawn)
