"""From documents to packed sequences: tokenise, cache, split, pack, load; or blocks as they are."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from windlass.config import listing
from windlass.data.blocks import BlockRows
from windlass.data.corpus import (
    Corpus,
    Part,
    cached_corpus,
    corpus_of,
    given_vocabulary,
    is_learned,
    under,
    vocabulary_of,
)
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences, sequences, targets_of
from windlass.data.prepared import Prepared, Tokenized, Untokenized
from windlass.data.progress import progress as progress_bar
from windlass.data.section import FORMATS, SOURCES, Data
from windlass.data.split import SPLITS, Split, split
from windlass.data.streams.parts import Stream
from windlass.data.streams.prepared import StreamedData
from windlass.data.streams.rows import PackingSettings, StreamedRows
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.hub import chat_template
from windlass.terminal import Terminal

LEARNED = (
    "tokenizer.kind is bpe, which is learned from all documents, and data.source.stream is true; "
    "tokenizer.kind=hub or file names one that is there, and byte needs none"
)

__all__ = ["FORMATS", "SOURCES", "Data", "Prepared", "cache_of", "prepare", "rows_of_an_epoch"]
__all__ += ["Tokenized", "tokenized"]


def prepare(data: Data, tokenizer: Tokenizer, *, console: Console | None = None) -> Prepared:
    """Tokenises and packs what is not yet in the cache, and opens it; blocks are only opened."""
    console = console or Terminal(stderr=True)
    if data.has_blocks:
        return _untokenized(data, tokenizer)
    if data.is_streamed:
        return _streamed(data, tokenizer, console)
    corpora = tokenized(data, tokenizer, console=console)
    return Tokenized(data, _sequences(data, corpora, console), corpora=corpora)


def _streamed(data: Data, tokenizer: Tokenizer, console: Console) -> StreamedData:
    """The first part of a stream, which is waited for, and the rest as it will come."""
    cache, (part,) = cache_of(data), data.parts
    if tokenizer.kind == "bpe":
        raise UserError(LEARNED)
    vocabulary = vocabulary_with_template(data, tokenizer, console)
    stream = Stream(part.source, vocabulary, cache, console, data.format, data.checks)
    with progress_bar(console, "tokenising the first part", part.source.part_tokens) as advance:
        first = stream.make(0, advance)
    assert first is not None
    first = replace(first, vocabulary=vocabulary)
    splits = _packed(data, part.source, first, console)
    length, stride = data.length, data.stride or data.length
    settings = PackingSettings(length, stride, data.packing, data.lengthy, data.format.together)
    trained = splits["train"]
    assert isinstance(trained, Sequences)
    splits["train"] = StreamedRows(trained, stream, settings)
    return StreamedData(data, splits, corpora=(first,))


def _untokenized(data: Data, tokenizer: Tokenizer) -> Untokenized:
    """The rows of blocks, and the vocabulary of their tokens where the recipe names one."""
    if tokenizer.kind == "bpe":
        raise UserError(
            f"tokenizer.kind is bpe, which is learned from text, and {data.parts[0].key} has "
            "blocks; tokenizer.kind=file or hub names the vocabulary that their tokens are of, and "
            "without a tokenizer they are trained on as well"
        )
    # Bytes are what a recipe without a tokenizer has, and no block says that it is of them.
    text = None if tokenizer.kind == "byte" else given_vocabulary(tokenizer)
    if not data.columns:
        raise UserError(f"{data.parts[0].key} has rows without a column: nothing can be read")
    splits = []
    for part in data.parts:
        with under(part.key):
            if text is not None:
                part.source.check_vocabulary(text.described)
            splits.append(_block_rows(data, part))
    return Untokenized(data, _joined(data, splits), text=text)


def _block_rows(data: Data, part: Part) -> dict[str, Split]:
    """The rows of each split of a source of blocks."""
    splits: dict[str, Split] = {}
    for name in _split_names(data):
        rows = BlockRows(part.source, name, data.validation, data.test, data.split_seed)
        if not len(rows):
            raise UserError(_no_rows(name, data, len(part.source)))
        splits[name] = rows
    return splits


def _joined(data: Data, splits: Sequence[Mapping[str, Split]]) -> dict[str, Split]:
    """The rows of each split, of one source or of several in their shares."""
    if data.mixture is None:
        return dict(splits[0])
    shares = [part.share for part in data.parts]
    return {name: Mixture([rows[name] for rows in splits], shares) for name in splits[0]}


def _split_names(data: Data) -> list[str]:
    """Names of the splits that a recipe has."""
    return [name for name in SPLITS if name == "train" or data.holds_out(name)]


def rows_of_an_epoch(data: Data, tokenizer: Tokenizer) -> int | None:
    """Rows in an epoch of training, where that is known without reading a document."""
    if data.has_blocks:
        return len(prepare(data, Tokenizer()).split("train"))
    if data.is_streamed:
        return None
    cache, quiet = cache_of(data), Terminal(quiet=True)
    if not is_learned(data.parts, tokenizer, cache, data.format):
        return None
    vocabulary = vocabulary_with_template(data, tokenizer, quiet)
    corpora = []
    for part in data.parts:
        corpus = cached_corpus(part.source, vocabulary, cache, data.format, data.checks)
        if corpus is None:
            return None
        corpora.append(corpus)
    return len(_sequences(data, corpora, quiet)["train"])


def tokenized(
    data: Data, tokenizer: Tokenizer, *, console: Console | None = None
) -> tuple[Corpus, ...]:
    """The documents of each source as tokens, before they are parted and packed."""
    console = console or Terminal(stderr=True)
    cache, vocabulary = cache_of(data), vocabulary_with_template(data, tokenizer, console)
    corpora = []
    for part in data.parts:
        with under(part.key):
            corpora.append(
                corpus_of(part.source, vocabulary, cache, console, data.format, data.checks)
            )
    return tuple(corpora)


def vocabulary_with_template(data: Data, tokenizer: Tokenizer, console: Console) -> Vocabulary:
    """The vocabulary of a recipe, with the chat template that its format names."""
    plain = vocabulary_of(data.parts, tokenizer, cache_of(data), console, data.format)
    template = data.format.template
    return plain if template is None else plain.with_template(chat_template.source(template))


def _sequences(data: Data, corpora: Sequence[Corpus], console: Console) -> dict[str, Split]:
    """The packed sequences of each split, of one source or of several in their shares."""
    splits = []
    for part, tokens in zip(data.parts, corpora, strict=True):
        with under(part.key):
            splits.append(_packed(data, part.source, tokens, console))
    return _joined(data, splits)


def _packed(data: Data, source: Any, tokens: Corpus, console: Console) -> dict[str, Split]:
    """The packed sequences of each split of a source."""
    if alone := _cut(data, tokens):
        tokens, parts = alone, {name: np.array([i]) for i, name in enumerate(SPLITS)}
        _note_cut(source, tokens, console)
    else:
        shares = {"validation": data.validation, "test": data.test}
        rows = split(tokens.rows, **shares, seed=data.split_seed)
        parts = {name: tokens.of(some) for name, some in rows.items()}
    splits: dict[str, Split] = {}
    for name in _split_names(data):
        documents = parts[name]
        packed = splits[name] = sequences(
            tokens,
            documents,
            length=data.length,
            stride=data.stride or data.length,
            packing=data.packing,
            is_once=name != "train",
            longer=data.lengthy,
            together=data.format.together,
            console=console,
        )
        if not len(packed):
            raise UserError(_nothing_in(name, data, source, tokens, documents))
        if not packed.tokens:
            raise UserError(
                f"data.length is {data.length}, and what is trained on in the {name} documents of "
                "data.source stands behind that, where they are cut; a longer row, or "
                "data.longer=split would do"
            )
    return splits


def _cut(data: Data, tokens: Corpus) -> Corpus | None:
    """The corpus of a single document, cut so that its end is held out; None: it is not single."""
    shares = (data.validation, data.test)
    if data.format.reads != "text" or not any(shares):
        return None
    (whole,) = np.nonzero(np.diff(tokens.offsets))
    if len(whole) != 1:
        return None
    begin, end = tokens.offsets[whole[0] : whole[0] + 2].tolist()
    # A document of two tokens has a target.
    validation, test = (max(2, round((end - begin) * share)) if share else 0 for share in shares)
    if end - begin < 2 + validation + test:
        return None
    return tokens.cut((begin, end - validation - test, end - test, end))


def _note_cut(source: Any, tokens: Corpus, console: Console) -> None:
    held_out = dict(zip(SPLITS, np.diff(tokens.offsets).tolist(), strict=True))
    del held_out["train"]
    ends = [f"{size:,} tokens for {name}" for name, size in held_out.items() if size]
    more = f"; {shorter}, held out at random" if (shorter := _shorter(source)) else ""
    console.print(
        f"the data is a single document, and its end is held out: {listing(ends, 'and')}{more}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _shorter(source: Any) -> str | None:
    """Advice on making more documents of the same text, where the source has a key for that."""
    smaller = {"file": "blank_line or line", "blank_line": "line"}
    kind = smaller.get(getattr(source, "documents", ""))
    return kind and f"data.source.documents={kind} makes more documents of the same text"


def cache_of(data: Data) -> Path:
    """Cache folder of prepared data."""
    place = data.cache or os.environ.get("WINDLASS_CACHE") or "~/.cache/windlass"
    folder = Path(place).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise UserError(
            f"prepared data goes to {folder}, which cannot be made ({wrong.strerror}); "
            "data.cache or WINDLASS_CACHE names another folder"
        ) from None
    return folder


def _nothing_in(name: str, data: Data, source: Any, tokens: Corpus, numbers: np.ndarray) -> str:
    documents, together = tokens.documents - tokens.empty, data.format.together
    sizes = targets_of(tokens.offsets, numbers).reshape(-1, together).sum(axis=1)
    if sizes.any():
        noun = "documents" if together == 1 else f"groups of {together} documents"
        of = "" if len(numbers) == tokens.documents else f"{name} "
        others = ", or data.longer=cut or split would do" if together == 1 else " would do"
        return (
            f"data.length is {data.length}, and all {(sizes > 0).sum():,} {of}{noun} of "
            f"data.source are longer, the shortest of {sizes[sizes > 0].min():,} tokens; "
            f"a longer row{others}"
        )
    also = f", or {_shorter(source) or 'make shorter documents of the same text'}"
    if name == "train":
        held_out = data.validation + data.test
        return (
            f"data.validation and data.test hold out {held_out:g} of {documents:,} documents of "
            f"data.source, which leaves none to train on; hold out less{also}"
        )
    return (
        f"data.{name} is {getattr(data, name):g}, and none of the {documents:,} documents of "
        f"data.source with text fell into that share; take a larger one{also}"
    )


def _no_rows(name: str, data: Data, rows: int) -> str:
    if name != "train":
        return (
            f"data.{name} is {getattr(data, name):g}, and none of the {rows:,} rows of data.source "
            "fell into that share; take a larger one"
        )
    if not rows:
        return "data.source has no rows"
    held_out = data.validation + data.test
    return (
        f"data.validation and data.test hold out {held_out:g} of {rows:,} rows of data.source, "
        "which leaves none to train on; hold out less"
    )
