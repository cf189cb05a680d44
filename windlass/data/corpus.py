"""Documents as tokens on disk, written once and mapped into memory.

A cache folder holds `corpora/KEY`, where KEY is a hash of the documents, the vocabulary and the
format; `known/START`, which says for a source as it stands and a vocabulary which KEY they gave;
`asked/SOURCE`, how a source stood when it was last tokenised; and `vocabularies/START`, what was
learned from sources as they stand. What is being written stands in a folder of its own until it is
whole, and is then renamed. Every file has its hash, which each start compares.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from windlass import files, seal
from windlass.config import tree
from windlass.data import integrity
from windlass.data import vocabulary as vocabularies
from windlass.data.checks import HOPELESS, Checker, Checks, Found
from windlass.data.documents import BATCH_CHARACTERS, Notes, all_text, tokenized_batches
from windlass.data.progress import progress
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import SAMPLE_CHARACTERS, SAMPLE_CHARACTERS_PER_TOKEN, Vocabulary
from windlass.errors import UserError
from windlass.formats import BaseFormat
from windlass.formats.text import Format as Plain
from windlass.hub.fetch import TOKENIZER, fetch
from windlass.sources import Source

PLAIN = Plain()
FORMAT = 3  # raised whenever the same documents would be written differently
CHANGED = "the documents of data.source changed while they were read; run it again"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document of a source as one long run of tokens, on disk.

    Document i is `tokens[offsets[i]:offsets[i + 1]]`: the beginning where the vocabulary has one,
    the text, the end; or ids as the source has them. One without text has no tokens at all.
    """

    folder: Path
    vocabulary: Vocabulary
    tokens: np.ndarray
    offsets: np.ndarray
    fingerprint: str  # of the documents alone
    weights: np.ndarray | None = None  # of each token as a target; None: all weigh 1
    owner: np.ndarray | None = None  # the row each document was made of; None: its own number
    notes: tuple[str, ...] = ()  # remarks on the examples, as they were printed
    checked: Found | None = None  # counts of the checks, where examples were checked
    cuts: tuple[int, ...] = ()  # ends of the parts of a single document, as if each were one

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def rows(self) -> int:
        """Number of rows that the documents were made of."""
        return self.documents if self.owner is None else int(self.owner[-1]) + 1

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The documents that were made of some rows."""
        if self.owner is None:
            return rows
        is_selected = np.zeros(self.rows, bool)
        is_selected[rows] = True
        return np.flatnonzero(is_selected[self.owner])

    def cut(self, cuts: tuple[int, ...]) -> "Corpus":
        """The same with a single document cut into several."""
        parts = np.zeros(len(cuts) - 1, np.int64)
        return replace(self, offsets=np.array(cuts, np.int64), owner=parts, cuts=cuts)

    @property
    def empty(self) -> int:
        """Number of documents without text."""
        return int((np.diff(self.offsets) == 0).sum())


class Part(NamedTuple):
    """A source of a mixture, or the only one."""

    key: str  # in the recipe
    source: Any  # of documents (`Source`) or of blocks (`Blocks`)
    weight: float
    share: float  # of the rows that are drawn


def vocabulary_of(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    cache: Path,
    console: Console,
    format: BaseFormat = PLAIN,
) -> Vocabulary:
    """The vocabulary of a recipe; one to be learned is trained on each source by its share."""
    if (vocabulary := given_vocabulary(tokenizer)) is not None:
        return vocabulary
    is_text = format.reads == "text"
    for part in parts:
        if part.source.yields != "text":
            raise UserError(
                f"tokenizer.kind is bpe, which is learned from text, and {part.key} has token ids; "
                "tokenizer.kind=file with tokenizer.path names the tokenizer that made them"
            )
    stamps = _stamps(parts)
    file = _vocabulary_file(parts, tokenizer, cache, format, stamps)
    if (content := integrity.entry(file)) is None:
        with claimed(cache / "building" / file.stem, console):
            if (content := integrity.entry(file, console)) is None:  # no other process was faster
                learned = _learned(parts, tokenizer, console, is_text)
                if _stamps(parts) != stamps:
                    raise UserError(CHANGED)
                content = {"text": learned.text, **learned.attributes}
                with room(cache, len(learned.text)):
                    seal.write_signed(file, content)
    return Vocabulary(**content)


def given_vocabulary(tokenizer: Tokenizer) -> Vocabulary | None:
    """The vocabulary that a recipe names; None where it is to be learned."""
    if tokenizer.kind == "byte":
        return vocabularies.byte()
    if tokenizer.kind == "file":
        assert tokenizer.path is not None
        return vocabularies.load(tokenizer.path, tokenizer.eos)
    if tokenizer.kind == "hub":
        assert tokenizer.hub is not None
        fetched = fetch(tokenizer.hub, tokenizer.revision, TOKENIZER, key="tokenizer.hub")
        return vocabularies.load(str(fetched.folder), tokenizer.eos)
    return None


def is_learned(
    parts: Sequence[Part], tokenizer: Tokenizer, cache: Path, format: BaseFormat
) -> bool:
    """Presence of a vocabulary: True where none has to be learned from documents."""
    if tokenizer.kind != "bpe":
        return True
    file = _vocabulary_file(parts, tokenizer, cache, format, _stamps(parts))
    return integrity.entry(file) is not None


def cached_corpus(
    source: Source,
    vocabulary: Vocabulary,
    cache: Path,
    format: BaseFormat = PLAIN,
    checks: Checks | None = None,
) -> Corpus | None:
    """Cache lookup: the tokens of a source and vocabulary as they stand; None: none, or damaged."""
    name = cache_name(source.fingerprint(), vocabulary, format, checks)
    return _cached(_known_file(cache, name), cache, vocabulary)


def corpus_of(
    source: Source,
    vocabulary: Vocabulary,
    cache: Path,
    console: Console,
    format: BaseFormat = PLAIN,
    checks: Checks | None = None,
) -> Corpus:
    """The tokens of a source: those in the cache, where source and vocabulary are as they were."""
    stamp = source.fingerprint()
    checks = checks_of(format, checks)
    entry = _known_file(cache, cache_name(stamp, vocabulary, format, checks))
    if corpus := _cached(entry, cache, vocabulary):
        return corpus
    with claimed(cache / "building" / entry.stem, console) as partial:
        if corpus := _cached(entry, cache, vocabulary, console):  # another process was faster
            return corpus
        former = cache / "asked" / f"{_key(source.described())}.json"
        before = integrity.entry(former, console)
        if before is not None and before["stamp"] != stamp:
            fields = {name: x for name, x in source.described().items() if x is not None}
            label = ", ".join(f"{name} {value}" for name, value in fields.items())
            console.print(
                f"the documents changed since they were tokenised, which is done again: {label}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        with progress(console, "tokenising", len(source)) as advance:

            def done(rows: int, tokens: int) -> None:
                advance(rows, f"{tokens / 1e6:,.1f}M tokens")

            how = (Notes(console), format, checks, done)
            content = write_corpus(source, vocabulary, partial, *how)
        if source.fingerprint() != stamp:
            raise UserError(CHANGED)
        about = json.loads((partial / "about.json").read_text())
        key = _cache_key(format, vocabulary, checks)
        key += [about["checked"], about["notes"]]  # what is known of dropped examples
        folder = cache / "corpora" / _key(FORMAT, content, vocabulary.fingerprint, *key)
        with room(cache, sum(file.stat().st_size for file in partial.iterdir())):
            if not integrity.is_whole(folder, console):
                files.publish(partial, folder)
            seal.write_signed(entry, {"corpus": folder.name})
            seal.write_signed(former, {"stamp": stamp})
        result = opened(folder)
        assert result is not None
        return replace(result, vocabulary=vocabulary)


def opened(folder: Path) -> Corpus | None:
    """A memory-mapped corpus, which `is_whole` has checked; None where it is not there."""
    if not (folder / "about.json").is_file():
        return None
    about = json.loads((folder / "about.json").read_text())
    text = (folder / vocabularies.FILE).read_text(encoding="utf-8")
    weights, owner = folder / "weights.bin", folder / "owner.npy"
    return Corpus(
        folder=folder,
        vocabulary=Vocabulary(text, **about["tokenizer"]),
        tokens=np.memmap(folder / "tokens.bin", about["dtype"], mode="r").view(np.ndarray),
        offsets=np.load(folder / "offsets.npy", mmap_mode="r").view(np.ndarray),
        fingerprint=about["content"],
        weights=np.memmap(weights, np.float32, mode="r").view(np.ndarray)
        if weights.is_file()
        else None,
        owner=np.load(owner) if owner.is_file() else None,
        notes=tuple(about["notes"]),
        checked=Found(**about["checked"]) if about["checked"] else None,
    )


@contextmanager
def claimed(place: Path, console: Console) -> Iterator[Path]:
    """A build folder, empty, locked against other processes that would build in it."""
    message = "another process is preparing the same data; waiting for it"
    with ExitStack() as entered:
        try:
            building = files.building(place, lambda: console.print(message))
            partial = entered.enter_context(building)
        except OSError as wrong:
            raise UserError(
                f"prepared data goes to {place.parents[1]}, which cannot be written "
                f"({wrong.strerror}); data.cache or WINDLASS_CACHE names another folder"
            ) from None
        yield partial


def save(file: Path, values: np.ndarray) -> None:
    """As `numpy.save`, whose own writing does not say why it fails."""
    with file.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(values))
        out.write(values.tobytes())


def room(place: Path, needed: int | Callable[[], int]) -> AbstractContextManager[None]:
    """Turn a full disk into a UserError that says how much is needed."""

    def refusal(full: OSError) -> str:
        mebibytes = max(0.1, (needed if isinstance(needed, int) else needed()) / 2**20)
        return (
            f"prepared data does not fit into {place} ({full.strerror}): about "
            f"{mebibytes:,.1f} MiB more are needed; make room there, or name another folder with "
            "data.cache or WINDLASS_CACHE"
        )

    return files.full_disk(refusal)


def _vocabulary_file(
    parts: Sequence[Part], tokenizer: Tokenizer, cache: Path, format: BaseFormat, stamps: list[str]
) -> Path:
    """Cache file of a vocabulary that was learned from sources as they stand."""
    of_rows = [] if format.reads == "text" else ["rows"]
    start = _key(FORMAT, tokenizer.vocab, stamps, [part.share for part in parts], *of_rows)
    return cache / "vocabularies" / f"{start}.json"


def cache_name(
    stamp: str, vocabulary: Vocabulary, format: BaseFormat, checks: Checks | None, *further: Any
) -> str:
    """Name of the tokens of a source as it stands, with a vocabulary, a format and checks."""
    key = _cache_key(format, vocabulary, checks_of(format, checks))
    return _key(FORMAT, stamp, vocabulary.fingerprint, *key, *further)


def _known_file(cache: Path, name: str) -> Path:
    """Cache entry that names the tokens of a source, as it stands."""
    return cache / "known" / f"{name}.json"


def checks_of(format: BaseFormat, checks: Checks | None) -> Checks | None:
    """The checks of a recipe: of rows there are some where it names none."""
    return Checks() if checks is None and format.reads == "rows" else checks


def _cached(
    entry: Path, cache: Path, vocabulary: Vocabulary, console: Console | None = None
) -> Corpus | None:
    known = integrity.entry(entry, console)
    if known is None:
        return None
    folder = cache / "corpora" / known["corpus"]
    corpus = opened(folder) if integrity.is_whole(folder, console) else None
    # Tokens are the same whatever the chat template, which a run stores and may be another here.
    return corpus and replace(corpus, vocabulary=vocabulary)


@contextmanager
def under(key: str) -> Iterator[None]:
    """Key of a source in errors: it names itself `data.source`, as if it were the only one."""
    try:
        yield
    except UserError as refused:
        raise UserError(str(refused).replace("data.source", key)) from None


def _stamps(parts: Sequence[Part]) -> list[str]:
    stamps = []
    for part in parts:
        with under(part.key):
            stamps.append(part.source.fingerprint())
    return stamps


def _learned(
    parts: Sequence[Part], tokenizer: Tokenizer, console: Console, is_text: bool
) -> Vocabulary:
    assert tokenizer.vocab is not None
    enough = min(SAMPLE_CHARACTERS, tokenizer.vocab * SAMPLE_CHARACTERS_PER_TOKEN)
    documents = sum(len(part.source) for part in parts)
    with progress(console, "reading for the vocabulary", documents) as advance:

        def texts() -> Iterator[str]:
            done = total = 0
            for part in parts:
                characters, refused = 0, []
                for number in vocabularies.sample(len(part.source), part.source.together()):
                    try:
                        source = part.source
                        text = source[number]["text"] if is_text else all_text(source.row(number))
                    except UserError as wrong:  # told with all like it when they are tokenised
                        refused += [] if characters else [str(wrong)]
                        if len(refused) == HOPELESS:
                            with under(part.key):
                                raise UserError(refused[0]) from None
                        continue
                    done, total, characters = done + 1, total + len(text), characters + len(text)
                    yield text
                    advance(done, f"{total / 1e6:,.1f}M characters")
                    if characters >= enough * part.share:
                        break

        return vocabularies.learn(texts(), tokenizer.vocab)


def write_corpus(
    source: Source,
    vocabulary: Vocabulary,
    folder: Path,
    notes: Notes,
    format: BaseFormat,
    checks: Checks | None,
    advance: Callable[[int, int], None],
    *,
    characters: int = BATCH_CHARACTERS,
    may_be_empty: bool = False,
) -> str | None:
    """Write the tokens of every document, a batch at a time, and return the documents' hash.

    `advance` is called after each batch of so many characters, with the rows and the tokens so far.
    None where there is no text, if that may be.
    """
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.uint32
    lengths, owners, content = array("q"), array("q"), hashlib.sha256()
    is_weighed = format.reads == "rows"
    total, done = 0, 0
    size = np.dtype(dtype).itemsize + (4 if is_weighed else 0)
    cache = folder.parent.parent
    checker = None if checks is None else Checker(checks)
    with ExitStack() as opened:
        # What all documents will take, by those that have been read.
        opened.enter_context(room(cache, lambda: total * size * len(source) // max(done, 1)))
        out = opened.enter_context((folder / "tokens.bin").open("wb"))
        beside = opened.enter_context((folder / "weights.bin").open("wb")) if is_weighed else None
        for batch in tokenized_batches(source, vocabulary, format, notes, checker, characters):
            for raw in batch.raw:
                content.update(len(raw).to_bytes(8, "little") + raw)
            tokens, sizes = batch.tokens, batch.sizes
            lengths.extend(sizes)
            owners.extend(batch.owners)
            total, done = total + len(tokens), done + batch.rows
            out.write(tokens.astype(dtype).tobytes())
            if beside is not None:
                beside.write(batch.weights.tobytes())
            advance(done, total)
    documents = len(source)
    if total == 0 and may_be_empty:
        if checker is not None:
            checker.finish_reading()
        return None
    checked = checker and checker.finish()
    if total == 0:
        raise UserError(
            f"data.source has no {source.yields}: {documents:,} documents, all of them empty"
            if documents
            else f"{_place(source)} has no documents"
        )
    with room(cache, total * size + 8 * documents):
        save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
        owner = np.array(owners, np.int64)
        if not np.array_equal(owner, np.arange(len(owner))):
            content.update(owner.tobytes())  # the splits follow from them
            save(folder / "owner.npy", owner)
        (folder / vocabularies.FILE).write_text(vocabulary.text, encoding="utf-8")
        about = {
            "format": FORMAT,
            "content": content.hexdigest(),
            "dtype": np.dtype(dtype).name,
            "tokenizer": vocabulary.attributes,
            "notes": notes.lines,
            "checked": checked and asdict(checked),
        }
        (folder / "about.json").write_text(json.dumps(about, indent=2))
        seal.seal(folder)
    return content.hexdigest()


def _place(source: Any) -> str:
    """A source by the place that it reads, where it has one."""
    for key in ("path", "name"):
        if hasattr(source, key):
            return f"data.source.{key} is {getattr(source, key)}, which"
    return "data.source"


def _cache_key(format: BaseFormat, vocabulary: Vocabulary, checks: Checks | None) -> list[Any]:
    """Cache key of the tokens of rows, beside the rows and the vocabulary."""
    if format.reads == "text":
        return [] if checks is None else [tree(checks)]
    kind = type(format).__module__.rpartition(".")[2]
    chat = vocabulary.chat
    # What a template is given, and not the settings: saved and read again these are others.
    template = None if chat is None else [chat.source, chat.variables]
    return [kind, tree(format), template, tree(checks)]


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
