"""Integrity of prepared data: every file of a cache against its hash, and what is damaged aside."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from windlass import files, seal
from windlass.config import listing

ENTRIES = ("known", "asked", "vocabularies")  # folders of small JSON files, each with its own hash


def is_whole(folder: Path, console: Console | None = None) -> bool:
    """Test that a folder is there, and every file in it as it was sealed.

    All bytes are read at every start: a flipped bit changes neither the size nor the time of a
    file, and a stamp of these would believe it. A damaged folder is moved aside where there is a
    console to say so, which is for the process that holds the lock.
    """
    if not folder.is_dir():
        return False
    if broken := seal.broken(folder):
        _put_aside(folder, broken, console)
    return not broken


def entry(file: Path, console: Console | None = None) -> dict[str, Any] | None:
    """The content of a JSON file of the cache; None where it is not there, or damaged.

    A damaged one is moved aside as a folder is.
    """
    try:
        return seal.opened(file)
    except FileNotFoundError:
        return None
    except ValueError:
        _put_aside(file, [file.name], console)
        return None


def is_cache(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("corpora", "streams"))


def damage(cache: Path) -> dict[str, list[str]]:
    """The folders of a cache, each with its damaged files; nothing is moved."""
    corpora = [path for path in sorted(cache.glob("corpora/*")) if _is_kept(path)]
    parts = [part for path in sorted(cache.glob("streams/*")) for part in parts_of(path)]
    rows = [path for one in corpora for path in sorted(one.glob("rows/*")) if _is_kept(path)]
    every = [*corpora, *rows, *parts]
    found = {str(place.relative_to(cache)): seal.broken(place) for place in every}
    for stream in sorted(cache.glob("streams/*")):
        found[str(stream.relative_to(cache))] = broken_entries(stream)
    for name in ENTRIES:
        entries = sorted((cache / name).glob("*.json"))
        found[name] = [file.name for file in entries if entry(file) is None]
    return found


def parts_of(stream: Path) -> list[Path]:
    """Sealed folders of a stream: its parts that are here, and their packed rows."""
    parts = [path for path in sorted(stream.glob("part-*")) if _is_kept(path)]
    return [*parts, *(path for one in parts for path in sorted(one.glob("rows/*")))]


def broken_entries(stream: Path) -> list[str]:
    """The damaged JSON files of a stream, which say where its parts begin and end."""
    entries = [*stream.glob("*.json"), *stream.glob("rows/*/*.json")]
    return [str(one.relative_to(stream)) for one in sorted(entries) if entry(one) is None]


def _is_kept(path: Path) -> bool:
    return path.is_dir() and ".damaged" not in path.name and not path.name.startswith(".")


def _put_aside(path: Path, broken: list[str], console: Console | None) -> None:
    if console is None:
        return
    # Another process may have been faster.
    with files.writable(path), suppress(FileNotFoundError):
        aside = files.put_aside(path)
        console.print(
            f"prepared data in {path} is damaged ({listing(broken, 'and')}); "
            f"it is now {aside}, and is made again",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
