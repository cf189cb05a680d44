"""Where documents come from: a file here is a kind of source, and `kind:` in a recipe names it."""

import glob
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from windlass.errors import UserError


@runtime_checkable
class Source(Protocol):
    """Documents by number, so that any of them can be read without reading the others.

    `fingerprint` is what a later start compares to learn whether the documents may have changed:
    cheap, and never a reading of them. `yields` is `text` where a document is `{"text": str}`.
    """

    yields: ClassVar[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def fingerprint(self) -> str: ...


def files(path: str, suffix: str) -> list[Path]:
    """The files that a path, a folder or a pattern names, in the order of their names."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(file for file in place.rglob(f"*{suffix}") if file.is_file())
        if not found:
            raise UserError(
                f"data.source.path is {path}, a folder without a file that ends in {suffix}; "
                "a pattern such as *.md names files with another ending"
            )
        return found
    found = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
    found = [file for file in found if file.is_file()]
    if not found:
        what = "matches no file" if glob.has_magic(path) else "does not exist"
        raise UserError(
            f"data.source.path is {path}, which {what}; it is looked for from {Path.cwd()}"
        )
    return found


def stamp(found: Sequence[Path], **how: Any) -> str:
    """A fingerprint of files by name, size and time of change, and of how they are read."""
    seen = [(str(file.resolve()), *_size_and_time(file)) for file in found]
    return hashlib.sha256(json.dumps([how, seen], sort_keys=True).encode()).hexdigest()


def decode(file: Path, raw: bytes, begin: int = 0) -> str:
    """UTF-8 without a byte order mark, or an error that names the file and the byte.

    Bytes are never replaced in silence: one wrong encoding would spoil a whole corpus unseen.
    """
    if begin == 0 and raw.startswith(b"\xef\xbb\xbf"):
        raw, begin = raw[3:], 3
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        where = f"byte {begin + wrong.start:,} is 0x{raw[wrong.start]:02x}"
        raise UserError(
            f"{file} is not UTF-8: {where}; "
            f"`iconv -f latin1 -t utf-8` converts a file, from whatever encoding it has"
        ) from None


def _size_and_time(file: Path) -> tuple[int, int]:
    known = file.stat()
    return known.st_size, known.st_mtime_ns
