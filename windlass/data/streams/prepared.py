"""Prepared data of a stream: its first part, and the rows of all others as they arrive."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.prepared import Prepared, Tokenized
from windlass.data.streams.parts import Stream
from windlass.data.streams.rows import StreamedRows


@dataclass(frozen=True, eq=False)
class StreamedData(Tokenized):
    """Documents that arrive in parts; what is known before training is of the first."""

    @property
    def rows(self) -> StreamedRows:
        """Rows to train on."""
        rows = self.splits["train"]
        assert isinstance(rows, StreamedRows)
        return rows

    @property
    def stream(self) -> Stream:
        assert isinstance(self.rows.folder, Stream)
        return self.rows.folder

    @property
    def commit(self) -> str | None:
        return self.stream.source.commit

    @property
    def fingerprint(self) -> str:
        source = self.stream.source
        values = [source.identity(), source.part_tokens, self.corpora[0].fingerprint]
        return hashlib.sha256(repr(values).encode()).hexdigest()

    @property
    def folders(self) -> list[Path]:
        return [self.stream.folder]

    def split(self, name: str) -> Sequences | Mixture | StreamedRows:  # pyright: ignore
        rows = Prepared.split(self, name)
        assert isinstance(rows, Sequences | StreamedRows)
        return rows

    def parts(self, name: str) -> tuple[Sequences, ...]:
        rows = self.split(name)
        assert not isinstance(rows, Mixture)
        return (rows.first if isinstance(rows, StreamedRows) else rows,)
