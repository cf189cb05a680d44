"""Files of JSON objects, one to a line or in one array: a document is one column of an object."""

import io
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.sources import Files, Records, SourceFile, decode, kind

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # the names that Arrow has for them
AT_ONCE = 2**20  # bytes
BLANK = " \t\r\n"
MARK = b"\xef\xbb\xbf"  # of the byte order


@section
class Source(Files, Records):
    """The rows of a .jsonl file, of every one in a folder, or of the files a pattern matches.

    A file may be one array of objects instead, and may be compressed: .gz or .zst.
    """

    suffix: ClassVar[tuple[str, ...]] = (".jsonl", *(f".jsonl{end}" for end in COMPRESSED))

    path: str  # a file, a folder or a pattern such as data/*.jsonl, or a URL of these

    @property
    def total(self) -> int:
        return len(self._index.spans)

    def where(self, index: int) -> str:
        number, line, _, _ = self._index.spans[index].tolist()
        unit = "row" if number in self._index.arrays else "line"
        return f"{self.files[number]} {unit} {line:,}"

    def row(self, index: int) -> dict[str, Any]:
        number, _, begin, end = self._index.spans[index].tolist()
        file, where = self._index.files[number], self.where(index)
        raw = decode(file, self.reader.read(file, begin, end), begin)
        try:
            row = parse_json(raw.rstrip())
        except ValueError as wrong:
            what = str(wrong)
            if isinstance(wrong, json.JSONDecodeError):
                what = f"{wrong.msg} at column {wrong.colno}"
            raise UserError(
                f"{where} is not JSON ({what}); one JSON object to a line is expected"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is {kind(row)}; one JSON object to a line is expected")
        return _mended(row) if "\\u" in raw else row

    @cached_property
    def _index(self) -> "RowIndex":
        """Index of the rows up to the limit: no file behind them is opened."""
        read, arrays = [], set()

        def rows() -> Iterator[tuple[int, int, int, int]]:
            for number, file in enumerate(self.files):
                read.append(_unpacked(file, read))
                if is_array := _is_array(read[-1]):
                    arrays.add(number)
                for span in (_elements if is_array else _lines)(read[-1]):
                    yield number, *span

        spans = array("q", chain.from_iterable(islice(rows(), self.limit)))
        return RowIndex(read, arrays, np.array(spans, np.int64).reshape(-1, 4))


class RowIndex(NamedTuple):
    """Places of rows in files."""

    files: list[SourceFile]  # as they are read: those that are compressed are unpacked
    arrays: set[int]  # numbers of the files that are one array
    spans: np.ndarray  # of each row its file, its line there, and its first and last byte, and 1


class ScratchFile:
    """A file without a name, which no kill leaves behind, closed with the last who reads it."""

    def __init__(self):
        self.descriptor: Any = None
        self.size = 0
        with tempfile.TemporaryFile() as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)

    def add(self, some: bytes) -> None:
        while some:  # of a disk that is almost full a write takes a part
            count = os.pwrite(self.descriptor, some, self.size)
            self.size, some = self.size + count, some[count:]


@dataclass(frozen=True, kw_only=True)
class Unpacked(SourceFile):
    """A compressed file, unpacked behind others into one: few can be open at a time.

    Of a compressed file no part can be read without all that is before it.
    """

    scratch: ScratchFile
    begin: int
    end: int

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(FileWindow(self), AT_ONCE)


class FileWindow(io.RawIOBase):
    """An unpacked file among others, read by position."""

    def __init__(self, file: Unpacked):
        self._file, self._at = file, file.begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        first, last = self._file.begin, self._file.end
        self._at = {os.SEEK_SET: first, os.SEEK_CUR: self._at, os.SEEK_END: last}[whence] + offset
        return self._at - first

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._file.end - self._at))
        some = os.pread(self._file.scratch.descriptor, size, self._at)
        buffer[: len(some)] = some
        self._at += len(some)
        return len(some)


def _unpacked(file: SourceFile, before: list[SourceFile]) -> SourceFile:
    """A file that can be read from any place, behind those that were unpacked before."""
    codec = COMPRESSED.get(os.path.splitext(file.name)[1])
    if codec is None:
        return file
    # Not above: it takes a moment to import, and most files are not compressed.
    import pyarrow

    last = next((one for one in reversed(before) if isinstance(one, Unpacked)), None)
    with _fitting(file):
        scratch = ScratchFile() if last is None else last.scratch
    begin = scratch.size
    try:
        with file.open() as packed, pyarrow.CompressedInputStream(packed, codec) as stream:
            while some := stream.read(AT_ONCE):
                with _fitting(file):
                    scratch.add(some)
    except (OSError, pyarrow.ArrowException) as wrong:
        why = str(wrong).partition("\n")[0].rstrip(".")
        raise UserError(f"{file} cannot be unpacked as {codec} ({why})") from None
    return Unpacked(file.name, scratch=scratch, begin=begin, end=scratch.size)


@contextmanager
def _fitting(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except OSError as full:
        raise UserError(
            f"{file} is unpacked in {tempfile.gettempdir()}, where it does not fit "
            f"({full.strerror}); TMPDIR names another folder"
        ) from None


def _is_array(file: SourceFile) -> bool:
    with file.open() as opened:
        while some := opened.read(AT_ONCE):
            if text := some.removeprefix(MARK).strip():
                return text.startswith(b"[")
    return False


def _lines(file: SourceFile) -> Iterator[tuple[int, int, int]]:
    place = 0
    with file.open() as opened:
        for line, raw in enumerate(opened, start=1):
            if raw.strip():
                yield line, place, place + len(raw)
            place += len(raw)


def _elements(file: SourceFile) -> Iterator[tuple[int, int, int]]:
    """Number and bytes of each element of an array."""
    with file.open() as opened:
        raw = opened.read()
    text, scan = decode(file, raw), json.JSONDecoder()
    at, number = _behind(text, 0) + 1, 0
    before = at + len(MARK) * raw.startswith(MARK)  # bytes before the character at `at`
    del raw
    try:
        while text[begin := _behind(text, at)] != "]":
            if number:
                if text[begin] != ",":
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, begin)
                begin = _behind(text, begin + 1)
            _, end = scan.raw_decode(text, begin)
            first = before + len(text[at:begin].encode())
            before, at, number = first + len(text[begin:end].encode()), end, number + 1
            yield number, first, before
        if (rest := _behind(text, begin + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
        return
    except json.JSONDecodeError as wrong:
        what = f"{wrong.msg} at line {wrong.lineno:,}, column {wrong.colno:,}"
    except IndexError:
        what = "the array has no end"
    except RecursionError:
        what = f"row {number + 1:,} is nested too deeply"
    raise UserError(
        f"{file} is not JSON ({what}); an array of objects, or one object to a line is expected"
    )


def _behind(text: str, place: int) -> int:
    """Place of the first character that is not blank."""
    while place < len(text) and text[place] in BLANK:
        place += 1
    return place


def _mended(value: Any) -> Any:
    """Replace lone surrogates, which JSON can escape and no UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(name): _mended(item) for name, item in value.items()}
    return value
