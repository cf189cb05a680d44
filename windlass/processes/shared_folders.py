"""Folders that the hosts of a run may have in common, and what is made in them only once."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from windlass.processes import hosts

T = TypeVar("T")

LATE = 10.0  # seconds in which a network file system shows what another host has written
BETWEEN_LOOKS = 0.05  # seconds
PROBE = ".probe-"  # how the names of files begin that are only there to be seen
LEFT = 3600.0  # seconds after which nobody looks for one any more: its process was killed


def once(name: str, folder: Path, make: Callable[[], T]) -> T:
    """The result of `make` on every process, where its slow part is cached in a folder.

    The first process makes it, and those that see the same folder wait, and then find it there.
    Others have a folder of their own, and make theirs at the same time.
    """
    if hosts.count() == 1:
        return make()
    is_shared = seen(folder, patience=0.0)[hosts.index()]
    if hosts.is_first() or not is_shared:
        result = make()
        hosts.barrier(name)
        return result
    hosts.barrier(name)
    return make()


def seen(folder: Path, *, patience: float | None = None) -> list[bool]:
    """True for each process that sees in its folder what the first has written into its own.

    They look for `patience` seconds, by default for as long as a file may be late.
    """
    if hosts.count() == 1:
        return [True]
    patience = LATE if patience is None else patience
    probe = hosts.broadcast_text("probe", _probe(folder) if hosts.is_first() else None)
    is_there = bool(probe) and _appears(folder / probe, patience)
    answers = hosts.each("sees the probe", "yes" if is_there else "no")
    if probe and hosts.is_first():
        (folder / probe).unlink(missing_ok=True)
    return [answer == "yes" for answer in answers]


def _probe(folder: Path) -> str:
    """The name of a new file in a folder, or nothing where none can be made."""
    name = f"{PROBE}{os.urandom(8).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other in folder.glob(f"{PROBE}*"):
            if time.time() - other.stat().st_mtime > LEFT:
                other.unlink(missing_ok=True)
        (folder / name).touch()
    except OSError:
        return ""
    return name


def _appears(file: Path, patience: float) -> bool:
    until = time.monotonic() + patience
    while not file.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(BETWEEN_LOOKS)
    return True
