"""Sources of data: a file here is a kind of source, and `kind:` in a recipe names it.

A source has documents, of text or of token ids, or it has blocks: rows of arrays, ready to be
trained on.
"""

import glob
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from windlass.columns import Column, Picture, square
from windlass.config import listing, section, tree
from windlass.config.reading import closest
from windlass.errors import UserError
from windlass.hub.row_stream import RowStream

# Version keys in the metadata of file systems, which change with the content; each has some.
VERSION_KEYS = (
    "size mtime created updated lastmodified last_modified etag generation md5hash version_id"
).split()
PROTOCOLS = {"gs": "pip install 'windlass-lm[cloud]'", "gcs": "pip install 'windlass-lm[cloud]'"}
FEW, MANY = 1, 64  # documents that are as cheap to read as one, at hand and far away


@runtime_checkable
class Source(Protocol):
    """Documents by number, so that any of them can be read without reading the others.

    `fingerprint` is what a later start compares to detect documents that may have changed:
    cheap, and never a reading of them. `yields` is `text` where a document is `{"text": str}`, and
    `tokens` where it is `{"tokens": np.ndarray}`. A source that `has_rows` also gives them whole,
    for formats that are made of several columns, and says where each is.
    """

    yields: ClassVar[str]
    has_rows: ClassVar[bool]

    @property
    def limit(self) -> int | None: ...

    @property
    def weight(self) -> float | None: ...

    def together(self) -> int: ...

    def numbers(self) -> Iterable[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...

    def fingerprint(self) -> str: ...

    def described(self) -> dict[str, Any]: ...


@runtime_checkable
class Streamed(Protocol):
    """Rows that are read once, in their order, while a run trains on those before.

    `fingerprint` and `identity` are of the rows as they stand now: the commit of a repository, say,
    to which `at` holds a source. `identity` is the same wherever the rows are kept.
    """

    yields: ClassVar[str]
    has_rows: ClassVar[bool]

    @property
    def part_tokens(self) -> int: ...

    @property
    def keep_parts(self) -> int | None: ...

    @property
    def limit(self) -> int | None: ...

    @property
    def commit(self) -> str | None: ...

    def at(self, commit: str) -> "Streamed": ...

    def identity(self) -> str: ...

    def fingerprint(self) -> str: ...

    def open(self, folder: Path, say: Callable[[str], None], stop: Event) -> RowStream: ...

    def chosen(self, row: dict[str, Any]) -> dict[str, Any]: ...

    def document(self, row: dict[str, Any], where: str) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...

    def described(self) -> dict[str, Any]: ...


@section
class Numbered:
    """The keys of every kind of source, whatever it reads."""

    yields: ClassVar[str]

    limit: int | None = None  # maximum number of documents, the first ones; null: all
    weight: float | None = None  # in data.mixture: sequences relative to those of others; null: 1

    @property
    def is_streamed(self) -> bool:
        """Streaming: documents arrive while a run trains, and the source is a `Streamed`."""
        return False

    def __len__(self) -> int:
        return self.total if self.limit is None else min(self.total, self.limit)

    @property
    def total(self) -> int:
        """Number of documents; a count above the limit may stop there."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        raise NotImplementedError

    def described(self) -> dict[str, Any]:
        """Identity of the request, the same before and after the documents change."""
        keys = {"kind": type(self).__module__.rpartition(".")[2], **tree(self)}
        del keys["weight"]
        return keys


@section
class Documents(Numbered):
    """The keys of every source of documents."""

    has_rows: ClassVar[bool] = False

    def numbers(self) -> Iterable[int]:
        """Numbers of the documents, in their order."""
        return range(len(self))

    def together(self) -> int:
        """Number of neighboring documents that are best read together, when sampling."""
        return FEW

    def row(self, index: int) -> dict[str, Any]:
        """All columns of a row, where the source has such."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Location of a row in words, such as `chats.jsonl line 12`."""
        raise NotImplementedError


@section
class Records(Documents):
    """The keys of every source of rows that have named columns, one of them the text."""

    yields: ClassVar[str] = "text"
    has_rows: ClassVar[bool] = True

    column: str = "text"  # for data.format text: the one that is read

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.document(self.row(index), self.where(index))

    def document(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """The text of a row."""
        if self.column not in row:
            raise without(where, self.column, list(row))
        text = row[self.column]
        if not isinstance(text, str):
            raise UserError(f"{where} has {kind(text)} in column {self.column}; text is expected")
        return {"text": text}


@section
class Blocks(Numbered):
    """Rows of arrays by number, past tokenizer, format, checks and packing.

    Puzzles, the cache of a teacher, arrays made elsewhere. `columns` is known without reading a
    row. `fingerprint` is of what the rows hold, wherever they are kept: a run that goes on, and
    every host of it, must have the same.
    """

    yields: ClassVar[str] = "blocks"

    @property
    def columns(self) -> dict[str, Column]:
        """Columns of a row, with a number for every axis."""
        raise NotImplementedError

    @property
    def hashed(self) -> tuple[str, ...]:
        """Columns that the token hash of a run is over; usual: tokens, or else all."""
        return ("tokens",) if "tokens" in self.columns else tuple(self.columns)

    @property
    def vocab(self) -> int | None:
        """Vocabulary size: one above the largest id of `tokens` and `targets`; None: no limit."""
        return None

    @property
    def identifiers(self) -> int | None:
        """Identifiers: one above the largest of the column `identifier`; None: no limit."""
        return None

    def rows(
        self, numbers: np.ndarray, epochs: np.ndarray | None, seed: int
    ) -> dict[str, np.ndarray]:
        """Batch of rows, each a pure function of its number, its epoch and the seed of the run.

        So augmentation stores nothing, and a run that goes on sees what it would have seen.
        `epochs` is None in evaluation, where rows are the same each time: as they are, without
        augmentation.
        """
        raise NotImplementedError

    @property
    def variants(self) -> int:
        """Number of variants of a row, itself included, whose answers can vote: usual, itself."""
        return 1

    def variant(self, numbers: np.ndarray, copy: int) -> dict[str, np.ndarray]:
        """Rows under an augmentation that follows from their numbers and that of the copy alone.

        Copy 0 is the row of evaluation.
        """
        raise NotImplementedError

    def restored(self, numbers: np.ndarray, copy: int, answers: np.ndarray) -> np.ndarray:
        """Inverse of that augmentation: answers `[rows, length]` to a variant, to the row itself.

        Answers that mean the same become the same tokens.
        """
        raise NotImplementedError

    @property
    def held_out(self) -> tuple[str, ...]:
        """Splits that the source has rows of its own for, in place of a share of all: usual, none.

        `len` does not count them.
        """
        return ()

    def held_out_numbers(self, split: str) -> np.ndarray:
        """Numbers of the rows of one of these splits."""
        raise NotImplementedError

    @property
    def groups(self) -> np.ndarray | None:
        """Group number of each row; rows of a group are in one split. None: each is on its own."""
        return None

    def check_vocabulary(self, described: str) -> None:
        """Refuse a vocabulary that the tokens are not of, where that is known."""

    def shown(self, row: dict[str, np.ndarray]) -> str:
        """A row as `windlass data` prints it."""
        lines = (f"{name}: {np.array2string(x, threshold=64)}" for name, x in row.items())
        return "\n".join(lines)

    @property
    def picture(self) -> Picture | None:
        """A row as a grid, for pages: usual, a square of numbers; None: it is none."""
        return square(self.columns)


@section
class Files(Documents):
    """The keys of every kind of source that reads files."""

    suffix: ClassVar[str | tuple[str, ...]]  # of the files that are meant in a folder

    path: str

    def together(self) -> int:
        return MANY if any(file.system for file in self.files) else FEW

    def described(self) -> dict[str, Any]:
        path = self.path if _is_url(self.path) else os.path.abspath(os.path.expanduser(self.path))
        return Documents.described(self) | {"path": path}

    def fingerprint(self) -> str:
        versions = [file.version() for file in self.stamped()]
        how = {name: value for name, value in self.described().items() if name != "path"}
        return hashlib.sha256(json.dumps([how, versions], sort_keys=True).encode()).hexdigest()

    def stamped(self) -> list["SourceFile"]:
        """Files as they are now."""
        return files(self.path, self.suffix)

    @cached_property
    def files(self) -> list["SourceFile"]:
        return files(self.path, self.suffix)

    @cached_property
    def reader(self) -> "Reader":
        return Reader()


@dataclass(frozen=True)
class SourceFile:
    """A file, on this machine or behind a URL, under the name that messages give it."""

    name: str
    system: Any = None  # of fsspec; None: the files of this machine

    def __str__(self) -> str:
        return self.name

    def open(self) -> io.BufferedReader:
        if self.system is None:
            return open(self.name, "rb")
        return io.BufferedReader(self.system.open(self.name, "rb"), 2**20)

    @property
    def size(self) -> int:
        return self.system.size(self.name) if self.system else os.stat(self.name).st_size

    def version(self) -> list:
        """A cheap version of the content (size, mtime, etag), without reading it."""
        if self.system is None:
            status = os.stat(self.name)
            return [os.path.realpath(self.name), status.st_size, status.st_mtime_ns]
        info = self.system.info(self.name).items()
        values = sorted([name, str(value)] for name, value in info if name.lower() in VERSION_KEYS)
        return [self.name, *values]


class Reader:
    """Reader of parts of files that keeps the last one open: parts mostly come in order."""

    def __init__(self):
        self._file: SourceFile | None = None
        self._opened: io.BufferedReader | None = None

    def read(self, file: SourceFile, begin: int, end: int) -> bytes:
        if file is not self._file or self._opened is None:
            self.close()
            self._file, self._opened = file, file.open()
        self._opened.seek(begin)
        return self._opened.read(end - begin)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __del__(self):
        self.close()


def files(
    path: str, suffix: str | tuple[str, ...], key: str = "data.source.path"
) -> list[SourceFile]:
    """Files of a path, a folder, a pattern or a URL, in the order of their names."""
    try:
        return _far(path, suffix) if _is_url(path) else _near(path, suffix)
    except OSError as wrong:
        why = wrong.strerror or str(wrong).strip() or type(wrong).__name__
        refused = f", which cannot be looked at ({why})"
    except _Refused as problem:
        refused = str(problem)
    raise UserError(f"{key} is {path}{refused}")


class _Refused(Exception):
    """Problem of a path."""


def decode(file: SourceFile, raw: bytes, begin: int = 0) -> str:
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


def without(where: str, column: str, has: Iterable[str]) -> UserError:
    """Error of a missing column."""
    meant = closest(column, has)
    hint = f"did you mean {meant}? " if meant else ""
    return UserError(
        f"{where} has no column {column}; {hint}"
        f"data.source.column can be one it has: {', '.join(has) or 'none'}"
    )


def kind(value: Any) -> str:
    """A value of JSON by what it is."""
    kinds = {dict: "an object", list: "an array", str: "text", bool: "a truth value"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _is_url(path: str) -> bool:
    return "://" in path


def _near(path: str, suffix: str | tuple[str, ...]) -> list[SourceFile]:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        names = sys.getfilesystemencoding()
        what = f", which no file can be named here, where names are in {names}; PYTHONUTF8=1 in "
        raise _Refused(f"{what}front of the command makes that UTF-8") from None
    place = Path(path).expanduser()
    if place.is_file():
        return [SourceFile(str(place))]
    if place.is_dir():
        below = (file for file in place.rglob("*") if file.name.endswith(suffix))
        inside = sorted(file for file in below if file.is_file())
        if not inside:
            raise _Refused(_without_files(suffix))
        return [SourceFile(str(file)) for file in inside]
    paths = sorted(Path(name) for name in glob.glob(str(place), recursive=True))
    paths = [SourceFile(str(file)) for file in paths if file.is_file()]
    if not paths:
        raise _Refused(f"{_absent(path)}; it is looked for from {Path.cwd()}")
    return paths


def _far(path: str, suffix: str | tuple[str, ...]) -> list[SourceFile]:
    # Not above: nobody who reads a recipe or files of this machine waits for it.
    import fsspec

    protocol = path.partition("://")[0]
    try:
        return _listed_far(*fsspec.url_to_fs(path), path, suffix)
    except (OSError, _Refused):
        raise
    except ImportError as missing:
        works = PROTOCOLS.get(protocol) or str(missing)
        raise _Refused(f"; {protocol}:// needs a package that is not here: {works}") from None
    except Exception as wrong:  # of a file system that somebody else wrote
        if isinstance(wrong, ValueError) and protocol not in fsspec.available_protocols():
            what = f"; no kind of file system is named {protocol}: gs, s3, https and file are some"
            raise _Refused(what) from None
        why = f"{type(wrong).__name__}: {str(wrong)[:200]}"
        raise _Refused(f", which cannot be looked at ({why})") from None


def _listed_far(
    system: Any, place: str, path: str, suffix: str | tuple[str, ...]
) -> list[SourceFile]:
    system.invalidate_cache()  # of an earlier look, which may be out of date
    if system.isfile(place):
        names = [place]
    elif system.isdir(place):
        names = [name for name in system.find(place) if name.endswith(suffix)]
        if not names:
            raise _Refused(_without_files(suffix))
    else:
        matching = system.glob(place) if glob.has_magic(place) else []
        names = [name for name in matching if system.isfile(name)]
        if not names:
            raise _Refused(_absent(path))
    return [SourceFile(system.unstrip_protocol(name), system) for name in sorted(names)]


def _without_files(suffix: str | tuple[str, ...]) -> str:
    endings = suffix if isinstance(suffix, str) else listing(suffix)
    return (
        f", a folder without a file that ends in {endings}; "
        "a pattern such as *.md names files with another ending"
    )


def _absent(path: str) -> str:
    return ", which matches no file" if glob.has_magic(path) else ", which does not exist"
