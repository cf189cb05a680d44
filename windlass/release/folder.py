"""The folder of an export: whole or absent, never over what is somebody's, on a disk with room."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from windlass import files, seal
from windlass.config import listing
from windlass.errors import UserError
from windlass.units import size

MARK = seal.EXPORT  # in every export: what it was made from, and the hash of each file
LOCK = ".lock"


def check_vacant(to: Path, force: bool) -> None:
    """Refuse a place where something is, but for an earlier export that may be replaced."""
    if to.name in ("", ".."):
        raise UserError(f"{to} has no name of its own; an export is a new folder, named with --to")
    if not to.exists():
        return
    if not to.is_dir():
        raise UserError(f"{to} is a file; an export is a folder, to be named with --to")
    if not any(to.iterdir()):
        return
    if not is_export(to):
        raise UserError(
            f"{to} is not empty, and what is in it was not exported by windlass; "
            "name a new folder with --to"
        )
    if not force:
        raise UserError(
            f"{to} holds an earlier export; --force replaces it, or name a new folder with --to"
        )


def check_room(to: Path, needed: int, smaller: str) -> None:
    """Refuse a disk that is too small; `smaller` says what would take less."""
    free = shutil.disk_usage(_existing(to)).free
    if needed > free:
        raise UserError(
            f"the export takes {size(needed)}, and the disk of {to} has {size(free)} free; make "
            f"room there, or name another folder with --to{smaller}"
        )


@contextmanager
def written(to: Path) -> Iterator[Path]:
    """Temporary folder to write in, which takes the place of `to` when the block ends well.

    A kill leaves it beside `to`, under a name with a dot in front, where the next export to the
    same place removes it.
    """
    partial = to.with_name(f".{to.name}{files.PARTIAL}")
    advice = "; nothing was left there. Make room, or name another folder with --to"
    with files.writable(to, advice):
        partial.mkdir(parents=True, exist_ok=True)
        with open(partial / LOCK, "w") as lock:
            if not files.lock(lock):
                raise UserError(f"another process exports to {to} now; wait for it")
            _clear(partial)
            try:
                yield partial
                (partial / LOCK).unlink()
                files.publish(partial, to)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise


def mark(folder: Path, **about: str) -> None:
    """Record what an export was made from, and the hash of each of its files."""
    seal.seal(folder, leave=[LOCK], name=MARK, **about)


def is_export(folder: Path) -> bool:
    return (folder / MARK).is_file()


class ExportReport(NamedTuple):
    """Integrity of an export: its files and their hashes."""

    folder: Path
    damaged: list[str]  # files

    @property
    def good(self) -> bool:
        return not self.damaged

    def __str__(self) -> str:
        state = "good" if self.good else f"damaged: {listing(self.damaged, 'and')}"
        return f"{self.folder}\n  {state}"


def verify(folder: Path) -> ExportReport:
    """Compare every file of an export with its hash."""
    return ExportReport(folder, seal.broken(folder, MARK))


def _clear(partial: Path) -> None:
    """Remove the leftovers of an export that was killed."""
    for path in partial.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _existing(path: Path) -> Path:
    """Nearest existing folder above."""
    path = path.absolute()
    return path if path.is_dir() else _existing(path.parent)
