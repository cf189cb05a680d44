"""Files on disk: atomic writes, folders published at once, advisory locks, a full disk."""

import errno
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from windlass.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota, the size of one file
DAMAGED = ".damaged"  # ends the name of what was damaged and is kept
PARTIAL = ".partial"  # ends the name of a file that is being written; a kill leaves it


def write(file: Path, content: str | bytes) -> None:
    """Atomic write: a temporary file, fsync, rename.

    A reader finds the former content or the new one, whole, whatever kills the writer. The
    temporary file has the number of the process in its name: two may write the same file at once.
    """
    raw = content.encode() if isinstance(content, str) else content
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: Path, content: Any) -> None:
    """Atomic write of JSON, laid out for people to read."""
    write(file, json.dumps(content, indent=2) + "\n")


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text that somebody else may have written, or a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def publish(partial: Path, folder: Path) -> None:
    """Publish a folder that was built elsewhere on the same disk: fsync, then rename."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    former = folder.with_name(f".{folder.name}.former")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(former, ignore_errors=True)
    if folder.exists():
        folder.rename(former)
    partial.rename(folder)
    shutil.rmtree(former, ignore_errors=True)


def aside(path: Path) -> Path:
    """A free name beside a damaged file or folder: NAME.damaged, NAME.damaged-2, ..."""
    names = itertools.chain([DAMAGED], (f"{DAMAGED}-{n}" for n in itertools.count(2)))
    paths = (path.with_name(path.name + name) for name in names)
    return next(free for free in paths if not free.exists())


def put_aside(path: Path) -> Path:
    """Rename what is damaged, so that it can be made again; returns its new place."""
    return path.rename(aside(path))


def lock(file: IO[Any] | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Take the advisory lock of an open file, which the system lets go when its holder dies.

    False where another process has it, unless this one is to wait.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, operation if wait else operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def folder_lock(folder: Path, *, shared: bool) -> Iterator[bool]:
    """The advisory lock of a folder in this block; False where another process has it.

    It needs no permission to write there. A file system that knows no such locks grants any.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            is_ours = lock(descriptor, shared=shared)
        except OSError:
            is_ours = True
        yield is_ours
    finally:
        os.close(descriptor)


@contextmanager
def building(place: Path, waiting: Callable[[], None]) -> Iterator[Path]:
    """A build folder, empty, locked against other processes that would build in it.

    A folder whose lock is free was left by a kill: it is emptied before use, and others like it
    are removed on the way. `waiting` is called before another process is waited for.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock_file:
        if not lock(lock_file):
            waiting()
            lock(lock_file, wait=True)
        for other in place.parent.glob("*.lock"):
            _sweep(other.with_suffix(""), spare=place)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def full_disk(refusal: Callable[[OSError], str]) -> Iterator[None]:
    """Turn ENOSPC and its like into a UserError with these words; other errors pass as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UserError(refusal(error)) from error


@contextmanager
def writable(place: Path, advice: str = "") -> Iterator[None]:
    """Turn an OSError at a place into a UserError; `advice` is added for a full disk alone."""
    try:
        yield
    except OSError as error:
        more = advice if error.errno in FULL else ""
        raise UserError(f"{place} cannot be written: {error.strerror}{more}") from error


def _sweep(place: Path, spare: Path) -> None:
    if place == spare or not place.exists():
        return
    with place.with_suffix(".lock").open("w") as lock_file:
        if lock(lock_file):
            shutil.rmtree(place, ignore_errors=True)
