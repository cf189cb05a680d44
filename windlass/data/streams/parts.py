"""Token cache of a stream: its parts, each a sealed folder, and what is known of every part.

A cache folder holds `streams/KEY`, where KEY is a hash of the rows' source as it stands, the
vocabulary, the format and the size of a part. In it are `part-00000` and so on, each a corpus;
beside it `part-00000.json`, where in the stream it begins and ends and a hash of its documents;
`end.json`, once the stream is known to end; `rows/PACKING/00000.json`, how many rows a part gives;
and `files`, what is downloaded and not yet read to its end. A part follows from where it begins,
so that one that was deleted is made again, to the same bits.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from windlass import files, seal
from windlass.data import integrity
from windlass.data.checks import Checks
from windlass.data.corpus import (
    FORMAT,
    Corpus,
    cache_name,
    checks_of,
    claimed,
    opened,
    room,
    write_corpus,
)
from windlass.data.documents import BATCH_CHARACTERS, Notes
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.formats import BaseFormat
from windlass.hub.download import Stopped
from windlass.hub.row_stream import Position, RowStream
from windlass.sources import Streamed
from windlass.units import count

FOLDER = "streams"  # of a cache


class KnownPart(NamedTuple):
    """A part that was made, whether or not its tokens are still there."""

    begin: Position
    end: Position
    content: str  # hash of its documents
    tokens: int


class PartFolder:
    """The folder of a stream, as far as it is made: what a process needs that makes no part."""

    def __init__(self, folder: Path):
        self.folder = folder

    def place(self, number: int) -> Path:
        return self.folder / f"part-{number:05}"

    def known(self, number: int) -> KnownPart | None:
        """Facts of a part; None where it was never made."""
        about = integrity.entry(self.place(number).with_suffix(".json"))
        if about is None:
            return None
        begin, end = (Position(*about[name]) for name in ("begin", "end"))
        return KnownPart(begin, end, about["content"], about["tokens"])

    @property
    def parts(self) -> int | None:
        """Number of parts; None: the end has not been seen."""
        about = integrity.entry(self.folder / "end.json")
        return None if about is None else about["parts"]

    def corpus(self, number: int, console: Console | None = None) -> Corpus | None:
        """The tokens of a part; None where they are not there, or damaged."""
        known, place = self.known(number), self.place(number)
        if known is None or not integrity.is_whole(place, console):
            return None
        corpus = opened(place)
        return corpus if corpus is not None and corpus.fingerprint == known.content else None


class Stream(PartFolder):
    """A stream of documents with its cache, in which parts are made one after the other."""

    def __init__(
        self,
        source: Streamed,
        vocabulary: Vocabulary,
        cache: Path,
        console: Console,
        format: BaseFormat,
        checks: Checks | None,
    ):
        self.source, self.vocabulary, self.cache, self.console = source, vocabulary, cache, console
        self.format, self.checks = format, checks_of(format, checks)
        stamp, size = source.fingerprint(), source.part_tokens
        self.name = cache_name(stamp, vocabulary, format, checks, size)
        PartFolder.__init__(self, cache / FOLDER / self.name)
        self.arrived = 0  # tokens of the part that is being made
        self.stop = threading.Event()
        self._rows: Iterator[tuple[dict[str, Any], Position]] | None = None
        self._position = Position()

    @cached_property
    def reader(self) -> RowStream:
        return self.source.open(self.folder, self.say, self.stop)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def arriving(self) -> str:
        """The part that is being made, in words."""
        done = f"{count(self.arrived)} of {count(self.source.part_tokens)} tokens are here"
        now = self.reader.downloading if "reader" in vars(self) else ""
        return f"{done}; downloading {now}" if now else done

    def make(
        self, number: int, advance: Callable[[int, str], None] = lambda tokens, note: None
    ) -> Corpus | None:
        """The tokens of a part: those in the cache, or made now; None: the stream ends before it.

        `advance` is called with the tokens so far, and with what is being downloaded.
        """
        if (corpus := self.corpus(number)) is not None:
            return corpus
        if (parts := self.parts) is not None and number >= parts:
            return None
        if number and self.known(number - 1) is None and self.make(number - 1) is None:
            return None
        with claimed(self.cache / "building" / f"{self.name}-{number}", self.console) as partial:
            if (corpus := self.corpus(number, self.console)) is not None:  # of another process
                return corpus
            return self._made(number, partial, advance)

    def _made(
        self, number: int, partial: Path, advance: Callable[[int, str], None]
    ) -> Corpus | None:
        before = self.known(number - 1) if number else None
        window = PartDocuments(self, before.end if before else Position())
        self.arrived, enough = 0, self.source.part_tokens

        def taken(rows: int, tokens: int) -> None:
            self.arrived = tokens
            window.is_full = tokens >= enough
            advance(tokens, "")

        self.reader.notice = lambda: advance(self.arrived, self.reader.downloading)
        how = (Notes(self.console), self.format, self.checks, taken)
        # Small parts are of small batches: a part ends with a batch.
        options = {"characters": min(BATCH_CHARACTERS, enough), "may_be_empty": number > 0}
        try:
            documents: Any = window  # whose kind is that of the stream's source, not of its class
            content = write_corpus(documents, self.vocabulary, partial, *how, **options)
        except BaseException:
            self._rows = None
            raise
        if content is None:
            seal.write_signed(self.folder / "end.json", {"parts": number})
            return None
        self._check_same(number, content)
        with room(self.cache, sum(file.stat().st_size for file in partial.iterdir())):
            files.publish(partial, self.place(number))
            about = {"begin": window.begin, "end": window.end, "tokens": self.arrived}
            about |= {"format": FORMAT, "content": content}
            seal.write_signed(self.place(number).with_suffix(".json"), about)
        if not window.is_full:
            seal.write_signed(self.folder / "end.json", {"parts": number + 1})
        self.reader.release(window.end)
        self.arrived = 0
        return opened(self.place(number))

    def rows(self, begin: Position) -> Iterator[tuple[dict[str, Any], Position]]:
        """The rows from a position on; one reader goes on from part to part."""
        if self._rows is None or self._position != begin:
            self._rows = self.reader.rows(begin)
        for row, after in self._rows:
            self._position = after
            yield self.source.chosen(row), after

    def delete_older(self, number: int) -> None:
        """Delete the tokens of parts that need not be kept behind the one that is trained on.

        The first stays, which has what is held out.
        """
        if (keep := self.source.keep_parts) is None:
            return
        kept = {self.place(one).name for one in (0, *range(number - keep, number + 2))}
        for place in self.folder.glob("part-*"):
            if place.is_dir() and place.suffix == "" and place.name not in kept:
                shutil.rmtree(place, ignore_errors=True)

    def _check_same(self, number: int, content: str) -> None:
        known = self.known(number)
        if known is not None and known.content != content:
            raise UserError(
                f"part {number} of data.source was made again, and its documents are others than "
                f"before; {self.folder} has the rest of the stream as it was. A cache in another "
                "folder (data.cache) begins anew"
            )


class PartDocuments:
    """The rows of a part as a source of documents, read once and in order, until it is full."""

    def __init__(self, stream: Stream, begin: Position):
        self.stream, self.begin, self.end = stream, begin, begin
        self.yields, self.has_rows = stream.source.yields, stream.source.has_rows
        self.limit, self.weight = stream.source.limit, None
        self.is_full = False
        self._row: dict[str, Any] = {}

    def __len__(self) -> int:
        """Number of rows so far."""
        return self.end.row - self.begin.row

    def numbers(self) -> Iterator[int]:
        rows = self.stream.rows(self.begin)
        while not self.is_full and (self.limit is None or self.end.row < self.limit):
            try:
                self._row, self.end = next(rows)
            except StopIteration:
                return
            if self.stream.stop.is_set():
                raise Stopped
            yield len(self) - 1

    def row(self, index: int) -> dict[str, Any]:
        return self._row

    def where(self, index: int) -> str:
        return self.stream.source.where(self.begin.row + index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.stream.source.document(self._row, self.where(index))

    def together(self) -> int:
        return 1

    def fingerprint(self) -> str:
        return self.stream.source.fingerprint()

    def described(self) -> dict[str, Any]:
        return {"path": str(self.stream.folder)}
