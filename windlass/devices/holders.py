"""Processes that hold a device file or libtpu's lockfile open, as `/proc` shows them."""

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

LOCKFILE = "/tmp/libtpu_lockfile"
TPU = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*", LOCKFILE)
GPU = ("/dev/nvidia[0-9]*",)
PROC = Path("/proc")


class Holder(NamedTuple):
    """A process that has a file open."""

    pid: int
    program: str  # and its script; other words may hold a secret
    file: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program})"


def holders(patterns: Sequence[str], proc: Path = PROC) -> list[Holder]:
    """Other processes that have one of these files open, as far as this user may see."""
    files = {file for pattern in patterns for file in glob(pattern)}
    found = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda one: int(one.name)):
        if int(folder.name) == os.getpid():
            continue
        if held := sorted(_open_files(folder) & files):
            found.append(Holder(int(folder.name), program(folder), held[0]))
    return found


def program(folder: Path) -> str:
    """Name of a process's program, and of the script that it runs."""
    try:
        words = (folder / "cmdline").read_bytes().split(b"\0")
        first, *others = [os.fsdecode(word) for word in words if word]
    except (OSError, ValueError):  # it is gone, or the kernel's
        return "unknown"
    script = [Path(word).name for word in others[:1] if not word.startswith("-")]
    return " ".join([Path(first).name, *script])


def _open_files(folder: Path) -> set[str]:
    found = set()
    try:
        for link in (folder / "fd").iterdir():
            found.add(os.readlink(link))
    except OSError:  # another user's, or it has ended
        pass
    return found
