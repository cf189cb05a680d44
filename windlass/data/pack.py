"""Sequence packing: documents into rows of equal length, as an index and rows read through it."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Console

from windlass import files, seal
from windlass.columns import (
    LENGTH,
    Column,
    ColumnReader,
    StoredColumn,
    sized,
)
from windlass.data.corpus import Corpus, claimed, opened, room, save
from windlass.data.integrity import is_whole
from windlass.data.split import Arrays, Numbers
from windlass.errors import UserError
from windlass.formats import Longer

FORMAT = 4  # raised whenever the same documents would be packed differently
COUNTED = 2**22  # targets that are counted at a time

Packing = Literal["documents", "none"]

# What every packed sequence has, one entry for each position.
COLUMNS = {
    "tokens": Column(np.int32, (LENGTH,)),
    "targets": Column(np.int32, (LENGTH,)),
    "weight": Column(np.float32, (LENGTH,)),  # of the target, above 0 where it is trained on
    "position": Column(np.int32, (LENGTH,)),  # from 0 in every piece
    "document": Column(np.int32, (LENGTH,), padding=-1),  # 0, 1, 2, ... within the row
}


class Piece(NamedTuple):
    """Part of a document in a row: its tokens from `start` to `stop` are what the model reads."""

    document: int
    start: int
    stop: int


class Index(NamedTuple):
    """Pieces in the order of rows; row i holds those from `first[i]` to `first[i + 1]`."""

    begin: np.ndarray  # where the piece begins among the tokens of the whole corpus
    size: np.ndarray
    document: np.ndarray
    first: np.ndarray


class Sequences:
    """Sequences of tokens as a model is trained on them, by number.

    A row holds whole documents, or pieces of those longer than it; every token of a document but
    the first is a target. Where pieces overlap, what a piece has in common with the one before it
    counts again, unless the number of these places is given as `seen`: then each target counts
    once, in the first piece that has it. What is left of a row is known by `document` -1 and
    `weight` 0, never by the token that stands there, which ends documents too.
    """

    def __init__(
        self,
        corpus: Corpus,
        folder: Path,
        length: int,
        seen: int = 0,
        beside: Mapping[str, StoredColumn] | None = None,
    ):
        self.corpus, self.folder, self.length, self.seen = corpus, folder, length, seen
        self.beside = dict(beside or {})
        mapped = [np.load(folder / f"{field}.npy", mmap_mode="r") for field in Index._fields]
        self.index = Index(*(array.view(np.ndarray) for array in mapped))

    def __reduce__(self):
        # Another process maps the same files; nothing of what they hold is sent.
        corpus = self.corpus.folder, self.corpus.cuts
        return _reopened, (*corpus, self.folder, self.length, self.seen, self.beside)

    def __len__(self) -> int:
        return len(self.index.first) - 1

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return {name: column[0] for name, column in self.batch([number]).items()}

    @property
    def columns(self) -> dict[str, Column]:
        further = {name: one.column for name, one in self.beside.items()}
        return sized(COLUMNS | further, self.length)

    def with_beside(self, beside: Mapping[str, StoredColumn]) -> "Sequences":
        """The same rows with further columns."""
        return Sequences(self.corpus, self.folder, self.length, self.seen, beside)

    @property
    def fingerprint(self) -> str:
        """Content hash of every row: the same documents in the same places give the same one."""
        content = hashlib.sha256(f"{self.corpus.fingerprint} {self.length} {self.seen}".encode())
        content.update(self.corpus.vocabulary.fingerprint.encode())
        for values in self.index:
            content.update(np.ascontiguousarray(values).tobytes())
        return content.hexdigest()

    @cached_property
    def tokens(self) -> int:
        """Number of targets that are trained on, each as often as it counts."""
        begin, size = self.index.begin, self.index.size
        total = self._trained(begin, size)
        if not self.seen:
            return total
        is_later = self._is_later(slice(None))
        return total - self._trained(begin[is_later], np.minimum(size[is_later], self.seen))

    @property
    def targets(self) -> int:
        """Number of targets, those included that are read and not trained on."""
        total = int(self.index.size.sum(dtype=np.int64))
        return total - self.seen * int(self._is_later(slice(None)).sum()) if self.seen else total

    @property
    def tokens_per_row(self) -> float:
        """Targets in a row as it is drawn that are trained on, on average."""
        return self.tokens / len(self)

    @property
    def targets_per_row(self) -> float:
        """Targets in a row as it is drawn, on average."""
        return self.targets / len(self)

    @property
    def documents(self) -> int:
        return len(np.unique(self.index.document))

    @property
    def pieces_per_row(self) -> np.ndarray:
        return np.diff(self.index.first)

    @cached_property
    def longer(self) -> int:
        """Number of documents that are longer than a row."""
        return int(np.load(self.folder / "longer.npy")[0])

    @cached_property
    def counts(self) -> np.ndarray:
        """Count of each token as a target, or the sum of its weights."""
        return np.load(self.folder / "counts.npy")

    @property
    def examples(self) -> np.ndarray:
        """Numbers of the rows of the source that the documents here were made of."""
        documents = np.unique(self.index.document)
        return documents if self.corpus.owner is None else np.unique(self.corpus.owner[documents])

    @property
    def efficiency(self) -> float:
        """Packing efficiency: the share of all positions that hold a target."""
        return self.targets / (len(self) * self.length)

    def pieces(self, number: int) -> list[Piece]:
        """Pieces of a row, from left to right; its columns number these from 0."""
        which = slice(*self.index.first[number : number + 2].tolist())
        document = self.index.document[which]
        start = self.index.begin[which] - self.corpus.offsets[document]
        stop = start + self.index.size[which]
        parts = zip(document.tolist(), start.tolist(), stop.tolist(), strict=True)
        return [Piece(*part) for part in parts]

    def batch(self, numbers: Numbers, epochs: np.ndarray | None = None, seed: int = 0) -> Arrays:
        """Several rows at once, the same in every epoch; the number -1 is a row of padding."""
        numbers = np.asarray(numbers, np.int64)
        first = self.index.first
        is_row = numbers >= 0
        pieces = np.where(is_row, first[numbers + 1] - first[numbers], 0)
        which = np.repeat(first[numbers], pieces) + _count(pieces)
        begin, size = self.index.begin[which], self.index.size[which].astype(np.int64)

        ends = np.cumsum(size)
        before_row = np.append(0, ends)[np.cumsum(pieces) - pieces]
        row = np.repeat(np.arange(len(numbers)), pieces)
        slot = row * self.length + ends - size - before_row[row]

        position = _count(size)
        source = np.repeat(begin, size) + position
        weight: np.ndarray | int = 1
        if self.corpus.weights is not None:
            weight = self.corpus.weights[source + 1]
        if self.seen:
            weight = weight * ~(np.repeat(self._is_later(which), size) & (position < self.seen))
        place = np.repeat(slot, size) + position

        def column(name: str, values: np.ndarray | int, otherwise: int) -> np.ndarray:
            flat = np.full(len(numbers) * self.length, otherwise, COLUMNS[name].dtype)
            flat[place] = values
            return flat.reshape(len(numbers), self.length)

        eos = self.corpus.vocabulary.eos
        tokens, targets = self.corpus.tokens[source], self.corpus.tokens[source + 1]
        self._check_known(tokens, targets)
        further = {name: one.column.padded(len(numbers)) for name, one in self.beside.items()}
        for name, values in self._reader.rows(numbers[is_row]).items():
            further[name][is_row] = values
        return further | {
            "tokens": column("tokens", tokens, eos),
            "targets": column("targets", targets, eos),
            "weight": column("weight", weight, 0),
            "position": column("position", position, 0),
            "document": column("document", np.repeat(_count(pieces), size), -1),
        }

    def _check_known(self, *ids: np.ndarray) -> None:
        """Refuse ids above the vocabulary, which a model would embed as some other token."""
        # The hashes say that a cache is as it was; bytes may still change while it is mapped.
        largest, size = max(int(some.max(initial=0)) for some in ids), self.corpus.vocabulary.size
        if largest >= size:
            raise UserError(
                f"prepared data in {self.corpus.folder} holds the token {largest:,}, and the "
                f"tokenizer has {size:,}; the next start checks all of it, and makes it again if "
                "it is damaged"
            )

    @cached_property
    def _reader(self) -> ColumnReader:
        return ColumnReader(self.beside)

    def _trained(self, begin: np.ndarray, size: np.ndarray) -> int:
        """Number of targets of some pieces that have a loss weight above 0."""
        if self.corpus.weights is None:
            return int(size.sum(dtype=np.int64))
        pieces = zip(begin.tolist(), size.tolist(), strict=True)
        weights = self.corpus.weights
        return int(sum(np.count_nonzero(weights[at + 1 : at + 1 + n]) for at, n in pieces))

    def _is_later(self, which: np.ndarray | slice) -> np.ndarray:
        """Mask of the pieces that are not the first of their document."""
        return self.index.begin[which] > self.corpus.offsets[self.index.document[which]]


def _reopened(
    corpus_folder: Path,
    cuts: tuple[int, ...],
    folder: Path,
    length: int,
    seen: int,
    beside: dict[str, StoredColumn],
) -> Sequences:
    corpus = opened(corpus_folder)
    assert corpus is not None
    corpus = corpus.cut(cuts) if cuts else corpus
    return Sequences(corpus, folder, length, seen, beside)


def sequences(
    corpus: Corpus,
    documents: np.ndarray,
    *,
    length: int,
    stride: int,
    packing: Packing,
    is_once: bool,
    console: Console,
    longer: Longer = "split",
    together: int = 1,
) -> Sequences:
    """Packed sequences of some documents, by an index that is stored with the corpus.

    Groups of `together` documents follow each other, and stay in one row.
    """
    described = f"{FORMAT} {length} {stride} {packing} {longer} {together} ".encode()
    described += documents.astype(np.int64).tobytes() + repr(corpus.cuts).encode()
    name = hashlib.sha256(described).hexdigest()[:32]
    folder = corpus.folder / "rows" / name
    if not is_whole(folder):
        with claimed(corpus.folder / "building" / name, console) as partial:
            if not is_whole(folder, console):
                settings = (length, stride, packing, longer, together)
                index = arrange(corpus.offsets, documents, *settings)
                whole = targets_of(corpus.offsets, documents).reshape(-1, together).sum(axis=1)
                too_long = (whole > length).sum()
                with room(corpus.folder, sum(values.nbytes for values in index)):
                    for field, values in index._asdict().items():
                        save(partial / f"{field}.npy", values)
                    save(partial / "longer.npy", np.array([too_long]))
                    save(partial / "counts.npy", _counts(corpus, index))
                    seal.seal(partial)
                    files.publish(partial, folder)
    return Sequences(corpus, folder, length, length - stride if is_once else 0)


def _counts(corpus: Corpus, index: Index) -> np.ndarray:
    """Count of each token among the targets of all pieces, or the sum of its weights."""
    counts = np.zeros(corpus.vocabulary.size)
    parts = 1 + int(index.size.sum(dtype=np.int64)) // COUNTED
    for begin, size in zip(
        np.array_split(index.begin, parts), np.array_split(index.size, parts), strict=True
    ):
        # The first token of a document is given, and never predicted.
        targets = np.repeat(begin, size) + _count(size) + 1
        weights = None if corpus.weights is None else corpus.weights[targets]
        counts += np.bincount(corpus.tokens[targets], weights, minlength=len(counts))
    return counts


def targets_of(offsets: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Number of targets of each document, which is also that of the tokens it is read from."""
    # A document of n tokens has n - 1 to read and n - 1 to predict.
    return np.maximum(offsets[documents + 1] - offsets[documents] - 1, 0)


def arrange(
    offsets: np.ndarray,
    documents: np.ndarray,
    length: int,
    stride: int,
    packing: Packing,
    longer: Longer = "split",
    together: int = 1,
) -> Index:
    """Pack the pieces of documents into rows."""
    readable = targets_of(offsets, documents)
    if together > 1:
        return _together(offsets, documents, readable, length, packing, together)
    if longer != "split":
        readable = np.where(readable > length, length if longer == "cut" else 0, readable)
    pieces = np.where(readable > 0, 1 - (-np.maximum(readable - length, 0) // stride), 0)
    start = _count(pieces) * stride
    size = np.minimum(np.repeat(readable, pieces) - start, length)
    begin = np.repeat(offsets[documents], pieces) + start
    document = np.repeat(documents, pieces)

    row = best_fit(size, length) if packing == "documents" else np.arange(len(size))
    return _index(row, begin, size, document)


def _together(
    offsets: np.ndarray,
    documents: np.ndarray,
    readable: np.ndarray,
    length: int,
    packing: Packing,
    together: int,
) -> Index:
    """Groups of whole documents; those that a row cannot hold, or that lack one, are left out."""
    groups = readable.reshape(-1, together)
    fits = (groups > 0).all(axis=1) & (groups.sum(axis=1) <= length)
    documents, size = documents.reshape(-1, together)[fits].ravel(), groups[fits]
    whole = size.sum(axis=1)
    row = best_fit(whole, length) if packing == "documents" else np.arange(len(whole))
    return _index(np.repeat(row, together), offsets[documents], size.ravel(), documents)


def _index(row: np.ndarray, begin: np.ndarray, size: np.ndarray, document: np.ndarray) -> Index:
    order = np.argsort(row, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(row))])
    return Index(begin[order], size[order].astype(np.int32), document[order], first)


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Best-fit decreasing bin packing: the longest piece first, into the fullest row that takes it.

    Pieces of one size are placed together, and so are rows with the same space left, so that the
    work grows with the number of sizes and not of pieces. A row is numbered by its earliest piece,
    which keeps rows in about the order of the documents.
    """
    row = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    ends = np.cumsum(np.bincount(sizes, minlength=room + 1)[::-1])[::-1].tolist()
    free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # rows by the space they have left
    spaces = 0  # bit s is set where `free[s]` has rows
    rows = 0

    for size in range(room, 0, -1):
        begin, end = ends[size + 1] if size < room else 0, ends[size]
        while begin < end:
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                filled = np.concatenate(free.pop(space))
                spaces ^= 1 << space
            else:
                space = room
                filled = np.arange(rows, rows + -(-(end - begin) // (room // size)))
                rows += len(filled)
            # Having taken one piece, a row is the fullest that can take another.
            each = space // size
            placed = min(len(filled) * each, end - begin)
            full, rest = divmod(placed, each)
            row[by_size[begin : begin + placed]] = np.repeat(filled[: full + 1], each)[:placed]
            begin += placed
            partly = full + (rest > 0)
            for left, which in (
                (space - each * size, filled[:full]),
                (space - rest * size, filled[full:partly]),
                (space, filled[partly:]),
            ):
                if left and len(which):
                    free[left].append(which)
                    spaces |= 1 << left

    earliest = np.unique(row, return_index=True)[1]
    renumbered = np.empty(rows, np.int64)
    renumbered[np.argsort(earliest)] = np.arange(rows)
    return renumbered[row]


def _count(lengths: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... for each length, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
