"""Permissions that bind root too, whom they do not bind otherwise."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = 0x20080522  # of the two structures below: capget(2)
OVERRIDE, READ, OWNER = 1 << 1, 1 << 2, 1 << 3  # rights to pass over the permissions of files


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder in which this thread may not write, whoever it belongs to."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice, for 64 of them
    if libc.capget(header, rights):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    before, mode = rights[0], folder.stat().st_mode
    folder.chmod(0o555)
    try:
        rights[0] &= ~(OVERRIDE | READ | OWNER)
        libc.capset(header, rights)
        yield
    finally:
        rights[0] = before
        libc.capset(header, rights)
        folder.chmod(mode)
