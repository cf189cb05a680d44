"""Documents as tokens on disk, written once and mapped into memory.

A cache folder holds `corpora/KEY`, where KEY is a hash of the documents, the tokeniser and the
format, and `known/START`, which says for a recipe's source and tokeniser which KEY they gave. What
is being written stands in a folder of its own until it is whole, and is then renamed.
"""

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from windlass.data import tokenizer as vocabularies
from windlass.data.progress import progress
from windlass.data.tokenizer import (
    SAMPLE_CHARACTERS,
    SAMPLE_CHARACTERS_PER_TOKEN,
    Tokeniser,
    Tokenizer,
)
from windlass.errors import UserError
from windlass.sources import Source

FORMAT = 1  # raised whenever the same documents would be written differently
BATCH_CHARACTERS = 2**20
BATCH_DOCUMENTS = 2048


@dataclass(frozen=True, eq=False)
class Corpus:
    """Every document of a source as one long run of tokens, on disk.

    Document i is `tokens[offsets[i]:offsets[i + 1]]`: the beginning where the tokeniser has one,
    the text, the end. A document without text has no tokens at all.
    """

    folder: Path
    tokeniser: Tokeniser
    tokens: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray  # how often each token is to be predicted
    fingerprint: str  # of the documents alone

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def empty(self) -> int:
        """How many documents have no text."""
        return int((np.diff(self.offsets) == 0).sum())


def corpus(source: Source, asked: Tokenizer, cache: Path, console: Console) -> Corpus:
    """The tokens of a source: those in the cache, where source and tokeniser are as they were."""
    tokeniser, vocabulary = _vocabulary(asked)
    stamp = source.fingerprint()
    start = _key(FORMAT, stamp, vocabulary)
    known = cache / "known" / f"{start}.json"
    if found := _known(known, cache):
        return found
    with claimed(cache / "building" / start, console) as partial:
        if found := _known(known, cache):  # another process was faster
            return found
        if tokeniser is None:
            tokeniser = _learned(source, asked, console)
        content = _tokenise(source, tokeniser, partial, console)
        if source.fingerprint() != stamp:
            raise UserError(
                "the documents of data.source changed while they were read; run it again"
            )
        folder = cache / "corpora" / _key(FORMAT, content, tokeniser.fingerprint)
        publish(partial, folder, is_whole=lambda: opened(folder) is not None)
        write_whole(known, json.dumps({"corpus": folder.name}))
    result = opened(folder)
    assert result is not None
    return result


def opened(folder: Path) -> Corpus | None:
    """A corpus mapped into memory, or nothing where it is not there or not whole."""
    if not (folder / "about.json").is_file():
        return None
    about = json.loads((folder / "about.json").read_text())
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    if any(sizes.get(name) != size for name, size in about["bytes"].items()):
        return None
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return Corpus(
        folder=folder,
        tokeniser=Tokeniser(text, eos=about["eos"], bos=about["bos"]),
        tokens=np.memmap(folder / "tokens.bin", about["dtype"], mode="r").view(np.ndarray),
        offsets=np.load(folder / "offsets.npy", mmap_mode="r").view(np.ndarray),
        counts=np.load(folder / "counts.npy"),
        fingerprint=about["content"],
    )


@contextmanager
def claimed(place: Path, console: Console) -> Iterator[Path]:
    """An empty folder to build in, that no other process builds in at the same time.

    A lock goes when its holder dies, however it dies. So a folder whose lock can be taken is a
    leftover: it is emptied before use, and others like it are removed on the way.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place, console):
        for other in place.parent.glob("*.lock"):
            _sweep(other.with_suffix(""), spare=place)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def publish(partial: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Puts what was built in its place at once, unless the same thing is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if is_whole():
        return
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def write_whole(file: Path, text: str) -> None:
    """Writes a file so that a reader finds either nothing or all of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def _known(known: Path, cache: Path) -> Corpus | None:
    if not known.is_file():
        return None
    return opened(cache / "corpora" / json.loads(known.read_text())["corpus"])


def _vocabulary(asked: Tokenizer) -> tuple[Tokeniser | None, str]:
    if asked.kind == "bpe":
        return None, f"bpe {asked.vocab}"
    if asked.kind == "file":
        assert asked.path is not None
        tokeniser = vocabularies.load(asked.path, asked.eos)
    else:
        tokeniser = vocabularies.byte()
    return tokeniser, tokeniser.fingerprint


def _learned(source: Source, asked: Tokenizer, console: Console) -> Tokeniser:
    assert asked.vocab is not None
    documents = len(source)
    enough = min(SAMPLE_CHARACTERS, asked.vocab * SAMPLE_CHARACTERS_PER_TOKEN)
    with progress(console, "reading for the vocabulary", documents) as tell:

        def texts() -> Iterator[str]:
            characters = 0
            for done, number in enumerate(vocabularies.sample(documents)):
                text = source[number]["text"]
                characters += len(text)
                yield text
                tell(done + 1, f"{characters / 1e6:,.1f}M characters")
                if characters >= enough:
                    return

        return vocabularies.learn(texts(), asked.vocab)


def _tokenise(source: Source, tokeniser: Tokeniser, folder: Path, console: Console) -> str:
    """Writes the tokens of every document, a batch at a time, and returns the hash of the text."""
    dtype = np.uint16 if tokeniser.size <= 2**16 else np.uint32
    lengths, content = array("q"), hashlib.sha256()
    counts = np.zeros(tokeniser.size, np.int64)
    total, documents = 0, len(source)
    with (
        (folder / "tokens.bin").open("wb") as out,
        progress(console, "tokenising", documents) as tell,
    ):
        for texts in _batches(source):
            for text in texts:
                raw = text.encode()
                content.update(len(raw).to_bytes(8, "little") + raw)
            tokens, sizes = _framed(texts, tokeniser)
            lengths.extend(sizes)
            out.write(tokens.astype(dtype).tobytes())
            # The first token of a document is given, and never predicted.
            firsts = tokens[(np.cumsum(sizes) - sizes)[sizes > 0]]
            counts += np.bincount(tokens, minlength=tokeniser.size)
            counts -= np.bincount(firsts, minlength=tokeniser.size)
            total += len(tokens)
            tell(len(lengths), f"{total / 1e6:,.1f}M tokens")
    if total == 0:
        raise UserError(
            f"data.source has no text: {documents:,} documents, all of them empty"
            if documents
            else "data.source has no documents"
        )
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(folder / "counts.npy", counts)
    tokeniser.save(folder / "tokenizer.json")
    about = {
        "format": FORMAT,
        "content": content.hexdigest(),
        "dtype": np.dtype(dtype).name,
        "eos": tokeniser.eos,
        "bos": tokeniser.bos,
        "bytes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2))
    return content.hexdigest()


def _batches(source: Source) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for number in range(len(source)):
        texts.append(source[number]["text"])
        characters += len(texts[-1])
        if characters >= BATCH_CHARACTERS or len(texts) >= BATCH_DOCUMENTS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _framed(texts: list[str], tokeniser: Tokeniser) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all texts, one after the other, and how many each has."""
    begin = np.array([] if tokeniser.bos is None else [tokeniser.bos], np.int32)
    end = np.array([tokeniser.eos], np.int32)
    parts: list[np.ndarray] = []
    sizes = np.zeros(len(texts), np.int64)
    for number, tokens in enumerate(tokeniser.encode_batch(texts)):
        if texts[number].strip():
            parts += (begin, tokens, end)
            sizes[number] = len(begin) + len(tokens) + len(end)
    return np.concatenate(parts) if parts else begin[:0], sizes


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@contextmanager
def _locked(place: Path, console: Console) -> Iterator[None]:
    with place.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("another process is preparing the same data; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(place: Path, spare: Path) -> None:
    if place == spare or not place.exists():
        return
    with place.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(place, ignore_errors=True)
