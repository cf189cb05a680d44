"""The compilation cache: JAX stores programs on disk, so that the next start need not compile."""

import os
import stat
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache

from windlass.files import FULL

LIMIT = 5 * 10**9  # bytes; JAX_COMPILATION_CACHE_MAX_SIZE says otherwise
BLOCK = 4096  # bytes that a disk with any room at all has
ENTRY, CHECKED = "*-cache", "checked"  # JAX's name of a program; the time of the last look


class Kept(NamedTuple):
    """The compilation cache of a run, and a warning about it."""

    folder: Path | None  # None: nowhere
    warning: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all programs there, of this run and of others."""
        return sum(about.st_size for _, about in _entries(self.folder)) if self.folder else 0


def keep(kind: str | None = None, devices: int = 1) -> Kept:
    """Enable JAX's compilation cache for every program, in its configured folder or in ours.

    Not for several devices on CPUs, simulated or of several processes: a program that XLA has read
    from the cache begins collectives that do not need each other in any order, another one on each
    device, which wait for each other until XLA aborts, or take each other's numbers.
    """
    if kind == "cpu" and devices > 1:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # or JAX goes on as it began
    if not setting("jax_enable_compilation_cache"):
        return Kept(None)
    # What takes no time to compile alone takes seconds in dozens.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if configured := setting("jax_compilation_cache_dir"):
        return Kept(Path(configured))
    place = Path(os.environ.get("WINDLASS_CACHE") or "~/.cache/windlass").expanduser()
    folder = place / "compiled"
    warning = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Kept(None, _unsafe(folder))
        _tidy(folder)
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror}"
        warning = f"compiled programs are not kept for the next start ({why})"
        if error.errno not in FULL or not folder.is_dir():
            return Kept(None, warning)
    # What JAX would say of each program, where the disk is full or gets so: each start looks anew.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return Kept(folder, warning)


def setting(name: str) -> Any:
    """A setting of `jax.config`."""
    return getattr(jax.config, name)


def _unsafe(folder: Path) -> str:
    return (
        f"compiled programs are not kept for the next start: others may write to {folder}, and "
        f"what is there is run; chmod 700 it, or name another folder with WINDLASS_CACHE"
    )


def _tidy(folder: Path) -> None:
    """Remove what a killed process left half written, and the longest unused above the limit."""
    checked = folder / CHECKED
    since = checked.stat().st_mtime if checked.exists() else 0.0
    entries = _entries(folder)
    for path, about in entries:
        if about.st_mtime >= since and not _is_whole(path):
            path.unlink(missing_ok=True)
    checked.write_bytes(bytes(BLOCK))  # which needs room, as the programs will
    # With a limit of its own JAX removes programs itself. By default it has none, for then it
    # looks at all of them whenever it keeps one: 0.2 s each, where there are two thousand.
    if setting("jax_compilation_cache_max_size") != -1:
        return
    entries.sort(key=lambda entry: -max(entry[1].st_atime, entry[1].st_mtime))
    total = 0
    for path, about in entries:
        total += about.st_size
        if total > LIMIT:
            path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The programs in a folder; one that another process removes meanwhile is none."""
    entries = []
    for path in folder.glob(ENTRY):
        with suppress(FileNotFoundError):
            entries.append((path, path.stat()))
    return entries


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    if data[:1] != b"\x78":  # not zlib's: where zstd is installed JAX uses that, and it is checked
        return len(data) > 0  # when read
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True
