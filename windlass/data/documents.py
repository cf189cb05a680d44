"""Documents as tokens, a batch at a time, each token with its loss weight as a target."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from windlass.data.checks import Checker, Checks
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.formats import BaseFormat, Rendered
from windlass.sources import Source

BATCH_CHARACTERS = 2**20  # or ids
BATCH_DOCUMENTS = 2048
HALF = re.compile("[\ud800-\udfff]")  # of a pair of surrogates, which no UTF-8 can hold alone


class Notes:
    """Remarks on examples while they are read: printed, and stored with their tokens."""

    def __init__(self, console: Console):
        self.lines: list[str] = []
        self._console = console

    def add(self, line: str) -> None:
        self.lines.append(line)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Some(NamedTuple):
    """A batch of documents: what is hashed of each, the tokens of all, and how many each has."""

    raw: list[bytes]
    tokens: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray = np.zeros(0, np.float32)  # of each token, where not all weigh the same
    owners: Sequence[int] = ()  # the row of each document, where some have several

    @property
    def rows(self) -> int:
        return len(set(self.owners)) if self.owners else len(self.sizes)


def tokenized_batches(
    source: Source,
    vocabulary: Vocabulary,
    format: BaseFormat,
    notes: Notes,
    checker: Checker | None,
    characters: int = BATCH_CHARACTERS,
) -> Iterator[Some]:
    """All documents of a source, in their order; without those that the checks leave out.

    A batch ends with the document by which it has so many `characters`, or ids.
    """
    if format.reads == "rows":
        assert checker is not None
        return _rendered(source, vocabulary, format, notes, checker, characters)
    if source.yields == "text":
        return _texts(source, vocabulary, checker, characters)
    return _ids(source, vocabulary)


def _rendered(
    source: Source,
    vocabulary: Vocabulary,
    format: BaseFormat,
    notes: Notes,
    checker: Checker,
    characters: int,
) -> Iterator[Some]:
    if not source.has_rows:
        raise UserError(
            f"data.format is {_name(format)}, which is made of whole rows, and data.source is "
            f"{_name(source)}, which has none; jsonl, parquet, csv, hub and example do"
        )
    batch: list[tuple[int, Rendered]] = []
    size, spelling, warned, is_settled = 0, [], defaultdict(list), False
    earlier: dict[str, Any] = {}
    for number in source.numbers():
        where, row = source.where(number), None
        with checker.making(where, counts=True):
            row = _at(number, source.row)
        if row is None:
            continue
        if not is_settled:
            with checker.making(where, counts=True):
                (format, note), is_settled = format.settled(row, where), True
                if note:
                    notes.add(note)
        if not is_settled:
            continue
        rendered: list[Rendered] = []
        if checker.takes(row, where):
            row = earlier = format.after(row, earlier)
            with checker.making(where):
                rendered = format.render(row, where, vocabulary.chat)
                if rendered and not checker.keeps((one.text for one in rendered), where):
                    rendered = []
        batch += [(number, one) for one in rendered]
        if any(one.spelled for one in rendered):
            spelling.append((number, rendered[0].spelled))
        # Of several documents of a row one that is as it should be is enough.
        if rendered and all(one.warning for one in rendered):
            warned[rendered[0].warning].append(number)
        size += sum(len(one.text) for one in rendered)
        if size >= characters or len(batch) >= BATCH_DOCUMENTS:
            yield _weighed(batch, vocabulary, source)
            batch, size = [], 0
    if batch:
        yield _weighed(batch, vocabulary, source)
    if spelling:
        number, token = spelling[0]
        notes.add(
            f"{len(spelling):,} of {len(source):,} rows spell out special tokens in their own "
            f"words, which the model reads as such: {token} in {source.where(number)}"
        )
    for warning, numbers in warned.items():
        first = source.where(numbers[0])
        notes.add(f"{len(numbers):,} of {len(source):,} rows, from {first}, {warning}")


def all_text(row: Any) -> str:
    """All text of a row, whatever its columns are."""
    if isinstance(row, dict | list):
        return "\n".join(map(all_text, row.values() if isinstance(row, dict) else row))
    return row if isinstance(row, str) else ""


def _name(section: Any) -> str:
    return type(section).__module__.rpartition(".")[2]


def _weighed(batch: list[tuple[int, Rendered]], vocabulary: Vocabulary, source: Source) -> Some:
    """Tokenized examples, with the loss weight of each token from those of its characters."""
    is_whole = batch[0][1].is_whole
    texts = [HALF.sub("\ufffd", one.text) for _, one in batch]
    read = vocabulary.read_batch(texts, special=is_whole)
    begin = [] if is_whole or vocabulary.bos is None else [vocabulary.bos]
    end = [] if is_whole else [vocabulary.eos]
    tokens, weights, sizes = [], [], np.zeros(len(batch), np.int64)
    for place, ((number, one), (ids, characters)) in enumerate(zip(batch, read, strict=True)):
        if not one.text.strip():
            continue
        of_tokens = _weights(one, characters)
        around = [0.0] * len(begin), [of_tokens[-1]] * len(end)
        weights.append(np.concatenate([around[0], of_tokens, around[1]]).astype(np.float32))
        tokens.append(np.concatenate([begin, ids, end]).astype(np.int32))
        sizes[place] = len(tokens[-1])
        if not weights[-1][1:].any():
            raise UserError(f"{source.where(number)} has nothing that is trained on")
    return Some(
        [repr(tuple(one)[:-1]).encode("utf-8", "surrogatepass") for _, one in batch],
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32),
        sizes,
        np.concatenate(weights) if weights else np.zeros(0, np.float32),
        [number for number, _ in batch],
    )


def _weights(one: Rendered, characters: np.ndarray) -> np.ndarray:
    """Loss weight of each token: the largest among its characters."""
    of_characters = np.zeros(len(one.text) + 1)
    for span in one.spans:
        of_characters[span.start : span.stop] = span.weight
    begin, end = characters.T
    between = np.stack([begin, np.maximum(end, begin + 1)], 1).ravel()
    return np.maximum.reduceat(of_characters, between)[::2]


def _texts(
    source: Source, vocabulary: Vocabulary, checker: Checker | None, characters: int
) -> Iterator[Some]:
    # Without checks too, all that cannot be read is counted before the first is named.
    reader = checker or Checker(Checks())

    def read(number: int) -> str:
        """A text, or none where it is to be left out: the others keep their numbers."""
        where = source.where(number) if source.has_rows else f"document {number:,}"
        with reader.making(where, counts=True):
            text = _at(number, source.__getitem__)["text"]
            if checker is None:
                reader.report.rows += 1
                return text
            row = _at(number, source.row) if source.has_rows else {"text": text}
            return text if checker.takes(row, where) and checker.keeps([text], where) else ""
        return ""

    for texts in _batches(map(read, source.numbers()), characters):
        yield Some([text.encode() for text in texts], *_framed(texts, vocabulary))
    if checker is None:
        reader.finish_reading()


def _ids(source: Source, vocabulary: Vocabulary) -> Iterator[Some]:
    before = 0
    numbers = source.numbers()
    for documents in _batches(_at(number, source.__getitem__)["tokens"] for number in numbers):
        tokens, sizes = np.concatenate(documents), np.array([len(ids) for ids in documents])
        is_strange = (tokens < 0) | (tokens >= vocabulary.size)
        if is_strange.any():
            first = int(is_strange.argmax())
            number = before + int(np.searchsorted(np.cumsum(sizes), first, side="right"))
            raise UserError(
                f"document {number:,} of data.source holds the id {tokens[first]}, and the "
                f"tokenizer has {vocabulary.size:,}, from 0 to {vocabulary.size - 1}; "
                "tokenizer.kind=file with tokenizer.path names the tokenizer that made the ids"
            )
        before += len(documents)
        raw = [ids.astype("<u4").tobytes() for ids in documents]
        yield Some(raw, tokens.astype(np.int64), sizes)


def _batches(documents: Iterable[Any], characters: int = BATCH_CHARACTERS) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= characters or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _at(number: int, read: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read(number)
    except OSError as wrong:
        why = wrong.strerror or str(wrong)
        raise UserError(f"data.source cannot be read at document {number:,}: {why}") from None


def _framed(texts: list[str], vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all texts, one after the other, and how many each has."""
    begin = np.array([] if vocabulary.bos is None else [vocabulary.bos], np.int32)
    end = np.array([vocabulary.eos], np.int32)
    parts: list[np.ndarray] = []
    sizes = np.zeros(len(texts), np.int64)
    for number, tokens in enumerate(vocabulary.encode_batch(texts)):
        if texts[number].strip():
            parts += (begin, tokens, end)
            sizes[number] = len(begin) + len(tokens) + len(end)
    return np.concatenate(parts) if parts else begin[:0], sizes
