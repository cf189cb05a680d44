"""Files of JSON objects, one to a line or in one array: a document is one column of an object."""

import io
import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.files import parse_json
from windlass.sources import Files, Records, SourceFile, decode, kind

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # the names that Arrow has for them
AT_ONCE = 2**20  # bytes
BLANK = " \t\r\n"


@section
class Source(Files, Records):
    """The rows of a .jsonl file, of every one in a folder, or of the files a pattern matches.

    A file may be one array of objects instead, and may be compressed: .gz or .zst.
    """

    suffix: ClassVar[tuple[str, ...]] = (".jsonl", *(f".jsonl{end}" for end in COMPRESSED))

    path: str  # a file, a folder or a pattern such as data/*.jsonl, or a URL of these

    @property
    def total(self) -> int:
        return len(self._spans)

    def where(self, index: int) -> str:
        number, line, _, _ = self._spans[index].tolist()
        unit = "row" if number in self._arrays else "line"
        return f"{self.files[number]} {unit} {line:,}"

    def row(self, index: int) -> dict[str, Any]:
        number, _, begin, end = self._spans[index].tolist()
        file, where = self._plain[number], self.where(index)
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
    def _plain(self) -> list[SourceFile]:
        """The files as they are read: those that are compressed are unpacked, once."""
        return [_unpacked(file) for file in self.files]

    @cached_property
    def _arrays(self) -> set[int]:
        """Numbers of the files that are one array."""
        return {number for number, file in enumerate(self._plain) if _is_array(file)}

    @cached_property
    def _spans(self) -> np.ndarray:
        """Of each row its file, its line there, and the bytes from the first to behind the last."""
        spans = array("q")
        for number, file in enumerate(self._plain):
            for span in _elements(file) if number in self._arrays else _lines(file):
                spans.extend((number, *span))
                if len(spans) // 4 == self.limit:
                    return np.array(spans, np.int64).reshape(-1, 4)
        return np.array(spans, np.int64).reshape(-1, 4)


@dataclass(frozen=True)
class Unpacked(SourceFile):
    """A compressed file, unpacked into one without a name, so that no kill leaves it behind.

    Of a compressed file no part can be read without all that is before it.
    """

    content: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __del__(self):
        self.content.close()

    def open(self) -> io.BufferedReader:
        opened = os.fdopen(os.dup(self.content.fileno()), "rb")
        opened.seek(0)
        return opened

    def add(self, some: bytes) -> None:
        try:
            self.content.write(some)
            self.content.flush()
        except OSError as full:
            raise UserError(
                f"{self.name} is unpacked in {tempfile.gettempdir()}, where it does not fit "
                f"({full.strerror}); TMPDIR names another folder"
            ) from None


def _unpacked(file: SourceFile) -> SourceFile:
    codec = COMPRESSED.get(os.path.splitext(file.name)[1])
    if codec is None:
        return file
    # Not above: it takes a moment to import, and most files are not compressed.
    import pyarrow

    unpacked = Unpacked(file.name, file.system)
    try:
        with file.open() as packed, pyarrow.CompressedInputStream(packed, codec) as stream:
            while some := stream.read(AT_ONCE):
                unpacked.add(some)
    except (OSError, pyarrow.ArrowException) as wrong:
        why = str(wrong).partition("\n")[0].rstrip(".")
        raise UserError(f"{file} cannot be unpacked as {codec} ({why})") from None
    return unpacked


def _is_array(file: SourceFile) -> bool:
    with file.open() as opened:
        for line in opened:
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
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
    size = len(raw) - len(text.encode())  # of a byte order mark
    at, number = _behind(text, 0) + 1, 0
    before = size + len(text[:at].encode())  # bytes before the character at `at`
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
