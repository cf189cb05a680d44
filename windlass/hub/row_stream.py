"""Rows of the files of a data set in their order, each file downloaded when its turn comes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from windlass.errors import UserError
from windlass.hub.download import RemoteFile, download, forget
from windlass.units import size


class Position(NamedTuple):
    """A place in a stream: that of the next row."""

    row: int = 0  # of the whole stream
    file: int = 0
    line: int = 0  # of that file


@dataclass
class RowStream:
    """Rows of files, from any position on; at most the files of rows to come are on this machine.

    A file is read whole from this machine, by the `datasets` library, so that a lost connection
    is the concern of the download alone.
    """

    files: Sequence[RemoteFile | Path]
    module: str  # of the `datasets` library, which reads such files: parquet, json, csv, text, ...
    options: dict[str, Any]  # of that module
    folder: Path  # of downloaded files
    say: Callable[[str], None]
    stop: Event
    downloading: str = ""  # in words; empty where nothing is
    notice: Callable[[], None] = lambda: None  # called when that changes

    def rows(self, begin: Position) -> Iterator[tuple[dict[str, Any], Position]]:
        """Every row from a position on, with the position after it."""
        number, line = begin.row, begin.line
        for file in range(begin.file, len(self.files)):
            for row in self._read(self._fetched(file), line):
                number, line = number + 1, line + 1
                yield row, Position(number, file, line)
            line = 0

    def release(self, before: Position) -> None:
        """Delete downloaded files of which no row comes behind a position."""
        for number in range(before.file):
            if (place := self._place(number)) is not None:
                forget(place)

    def _place(self, number: int) -> Path | None:
        file = self.files[number]
        if isinstance(file, Path):
            return None
        return self.folder / f"{number:05}-{Path(file.path).name}"

    def _fetched(self, number: int) -> Path:
        file, place = self.files[number], self._place(number)
        if place is None:
            assert isinstance(file, Path)
            return file
        assert isinstance(file, RemoteFile)

        def received(done: int, total: int) -> None:
            self.downloading = f"{size(done)} of {size(total)} of {file.path}"
            self.notice()

        try:
            return download(file, place, say=self.say, stop=self.stop, received=received)
        finally:
            self.downloading = ""

    def _read(self, place: Path, line: int) -> Iterator[dict[str, Any]]:
        import datasets
        from datasets.exceptions import DatasetsError

        try:
            rows: Any = datasets.load_dataset(
                self.module,
                data_files={"train": [str(place)]},
                split="train",
                streaming=True,
                **self.options,
            )
            yield from rows.skip(line)
        except (ValueError, OSError, DatasetsError) as wrong:
            why = str(wrong).strip().partition("\n")[0] or type(wrong).__name__
            raise UserError(f"{place} cannot be read as a file of a data set ({why})") from None
