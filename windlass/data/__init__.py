"""From documents to rows of tokens: tokenise, cache, split, pack, load."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from windlass.config import Open, listing, section
from windlass.data.checks import Checks
from windlass.data.corpus import Corpus, Part, corpus_of, is_learned, kept, under, vocabulary_of
from windlass.data.mix import CYCLE, Mixture
from windlass.data.pack import COLUMNS, Packing, Rows, rows, targets_of
from windlass.data.split import SPLITS, split
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.formats import Longer
from windlass.hub import chat_template

SOURCES = Open("windlass.sources", tag="kind", attribute="Source")
FORMATS = Open("windlass.formats", tag="kind", attribute="Format", usual="text")


@section
class Data:
    """What is trained on, and in what rows."""

    source: Annotated[Any, SOURCES] | None = None  # where documents come from, if from one place
    # in place of source, several: of all rows each has the share that its weight is of all weights,
    # beginning again where it ends; an epoch is as many rows as they have together
    mixture: tuple[Annotated[Any, SOURCES], ...] | None = None
    # how a row becomes text, and what of it is trained on
    format: Annotated[Any, FORMATS] = field(default_factory=FORMATS.load("text"))
    length: int = 1024  # tokens in a row
    # documents longer than a row: split over several, cut at its end, or dropped; null: split as
    # text, and dropped where a part of a document is no use
    longer: Longer | None = None
    # what is asked of every row; null: nothing of text, and elsewhere empty rows and those that
    # occur twice are told
    checks: Checks | None = None
    # long documents: each row begins so many tokens after the one before; null: length. Where rows
    # overlap, training counts a token in each of them, and evaluation in the first alone
    stride: int | None = None
    packing: Packing = "documents"  # none: one document, or a piece of one, in each row
    shuffle: bool = True  # anew in every epoch
    validation: float = 0.0  # the share of documents held out, of every source
    test: float = 0.0  # a second share, for `windlass evaluate --split test`
    split_seed: int = 0  # of which documents those are; another seed, other ones
    workers: int = 0  # processes that make batches; 0: a thread of this one does
    # batches made ahead of their use, at least one by each worker; 0: each when it is needed
    prefetch: int = 4
    cache: str | None = None  # null: $WINDLASS_CACHE, or ~/.cache/windlass

    def __post_init__(self):
        wrong = [*self._wrong_sources(), *self._wrong_numbers()]
        if wrong:
            raise ValueError(*wrong)

    @property
    def columns(self) -> dict[str, type[np.generic]]:
        """What a batch of it has, by name."""
        return COLUMNS | dict.fromkeys(self.format.columns, np.float32)

    @property
    def parts(self) -> list[Part]:
        """Each source with its key and its weight."""
        if self.mixture is None:
            assert self.source is not None
            return [Part("data.source", self.source, 1.0, 1.0)]
        weights = [1.0 if source.weight is None else source.weight for source in self.mixture]
        return [
            Part(f"data.mixture.{number}", source, weight, weight / (sum(weights) or 1.0))
            for number, (source, weight) in enumerate(zip(self.mixture, weights, strict=True))
        ]

    @property
    def lengthy(self) -> Longer:
        """What becomes of documents that are longer than a row."""
        return self.longer or self.format.longer

    def _wrong_sources(self) -> Iterator[str]:
        if self.mixture is None and self.source is None:
            kinds = listing(SOURCES.names())
            yield f"source is required: a section with kind: {kinds}; or mixture, a list of these"
            return
        if self.mixture is not None and self.source is not None:
            yield "mixture is given, and source too; data.source=null leaves one of them out"
            return
        if self.mixture == ():
            yield "mixture is empty; it is a list of sources, each with a weight"
            return
        wrong = []
        for part in self.parts:
            name, source = part.key.removeprefix("data."), part.source
            if source.limit is not None and source.limit < 1:
                wrong.append(f"{name}.limit is {source.limit}; it must be 1 or more")
            if source.weight is not None and self.mixture is None:
                wrong.append(f"{name}.weight is {source.weight:g}; it is for parts of a mixture")
            elif source.weight is not None and source.weight <= 0:
                wrong.append(f"{name}.weight is {source.weight:g}; it must be above 0")
        yield from wrong
        for number, part in enumerate(self.parts):
            if not wrong and part.share * CYCLE < 1:
                yield (
                    f"mixture.{number}.weight is {part.weight:g}, {part.share:.1g} of all weights; "
                    f"a part has one row in {CYCLE:,} or more"
                )

    def _wrong_numbers(self) -> Iterator[str]:
        if self.cache is not None and "://" in self.cache:
            yield f"cache is {self.cache}; it is a folder: that of a mounted bucket would do"
        if self.length < 1:
            yield f"length is {self.length}; a row holds at least 1 token"
        elif self.stride is not None and not 1 <= self.stride <= self.length:
            yield (
                f"stride is {self.stride}; it is 1 to length ({self.length}), beyond which tokens "
                "would be left out"
            )
        if self.format.together > 1 and self.lengthy != "drop":
            what = "documents that belong together stay whole: drop would do"
            yield f"longer is {self.longer}; {what}"
        if self.stride is not None and self.lengthy != "split":
            yield (
                f"stride is {self.stride}; it is for documents that are split over rows, and "
                f"longer ones are {'cut' if self.lengthy == 'cut' else 'dropped'}: "
                "data.longer=split splits them"
            )
        for name in ("workers", "prefetch", "split_seed"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"
        shares = {name: getattr(self, name) for name in ("validation", "test")}
        outside = [name for name, share in shares.items() if not 0 <= share < 1]
        for name in outside:
            yield f"{name} is {shares[name]}; it is a share, from 0 to below 1"
        if not outside and sum(shares.values()) >= 1:
            yield (
                f"validation is {self.validation} and test is {self.test}; "
                "together they leave nothing to train on"
            )


@dataclass(frozen=True, eq=False)
class Prepared:
    """The corpus of each source in the cache, and the documents parted into splits."""

    data: Data
    corpora: tuple[Corpus, ...]
    splits: dict[str, Rows | Mixture] = field(repr=False)
    drawn: int | None = None  # rows that are trained on in the whole run, where that is known

    @property
    def vocabulary(self) -> Vocabulary:
        return self.corpora[0].vocabulary

    @property
    def fingerprint(self) -> str:
        """Of the documents: the same text gives the same one, wherever it is kept."""
        if self.data.mixture is None:
            return self.corpora[0].fingerprint
        parts = [corpus.fingerprint for corpus in self.corpora]
        shares = [part.share for part in self.data.parts]
        return hashlib.sha256(repr([parts, shares]).encode()).hexdigest()

    @property
    def unigram_entropy(self) -> float:
        """Nats per token: the loss of a model that knows how common each token is and no more."""
        share = self.frequencies[self.frequencies > 0]
        return float(-(share * np.log(share)).sum())

    @cached_property
    def frequencies(self) -> np.ndarray:
        """The share of each token among all that are to be predicted, as sources are mixed."""
        trained = self.splits["train"]
        parts = trained.parts if isinstance(trained, Mixture) else (trained,)
        pairs = zip(self.data.parts, parts, strict=True)
        drawn = [part.share * rows.tokens_per_row for part, rows in pairs]
        counts = [corpus.counts / corpus.counts.sum() for corpus in self.corpora]
        return np.average(counts, axis=0, weights=drawn)

    def split(self, name: str) -> Rows | Mixture:
        if name not in self.splits:
            raise UserError(
                f"there are no {name} documents; data.{name}=0.05 holds out one in twenty"
            )
        return self.splits[name]


def prepare(data: Data, tokenizer: Tokenizer, *, console: Console | None = None) -> Prepared:
    """Tokenises and packs what is not yet in the cache, and opens it."""
    console = console or Console(stderr=True)
    corpora, splits = tokenized(data, tokenizer, console=console), []
    for part, tokens in zip(data.parts, corpora, strict=True):
        with under(part.key):
            splits.append(_parted(data, tokens, console))
    shares = [part.share for part in data.parts]
    joined: dict[str, Rows | Mixture] = {}
    for name in splits[0]:
        parts = [rows[name] for rows in splits]
        joined[name] = parts[0] if data.mixture is None else Mixture(parts, shares)
    return Prepared(data, corpora, joined)


def rows_of_an_epoch(data: Data, tokenizer: Tokenizer) -> int | None:
    """How many rows are trained on, where that is known without reading a document."""
    cache, quiet = cache_of(data), Console(quiet=True)
    if not is_learned(data.parts, tokenizer, cache, data.format):
        return None
    vocabulary = _vocabulary(data, tokenizer, quiet)
    asked = (cache, data.format, data.checks)
    if any(kept(part.source, vocabulary, *asked) is None for part in data.parts):
        return None
    return len(prepare(data, tokenizer, console=quiet).split("train"))


def tokenized(
    data: Data, tokenizer: Tokenizer, *, console: Console | None = None
) -> tuple[Corpus, ...]:
    """The documents of each source as tokens, before they are parted and packed."""
    console = console or Console(stderr=True)
    cache, vocabulary = cache_of(data), _vocabulary(data, tokenizer, console)
    corpora = []
    for part in data.parts:
        with under(part.key):
            corpora.append(
                corpus_of(part.source, vocabulary, cache, console, data.format, data.checks)
            )
    return tuple(corpora)


def _vocabulary(data: Data, tokenizer: Tokenizer, console: Console) -> Vocabulary:
    """The vocabulary of a recipe, with the chat template that its format asks for."""
    found = vocabulary_of(data.parts, tokenizer, cache_of(data), console, data.format)
    asked = data.format.template
    return found if asked is None else found.speaking(chat_template.found(asked))


def _parted(data: Data, tokens: Corpus, console: Console) -> dict[str, Rows]:
    """The rows of each split of a source."""
    shares = {"validation": data.validation, "test": data.test}
    parts = split(tokens.rows, **shares, seed=data.split_seed)
    splits: dict[str, Rows] = {}
    for name in SPLITS:
        if name != "train" and not getattr(data, name):
            continue
        documents = tokens.of(parts[name])
        splits[name] = rows(
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
        if not len(splits[name]):
            raise UserError(_nothing_in(name, data, tokens, documents))
        if not splits[name].tokens:
            raise UserError(
                f"data.length is {data.length}, and what is trained on in the {name} documents of "
                "data.source stands behind that, where they are cut; a longer row, or "
                "data.longer=split would do"
            )
    return splits


def cache_of(data: Data) -> Path:
    """The folder that prepared data is kept in."""
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


def _nothing_in(name: str, data: Data, tokens: Corpus, chosen: np.ndarray) -> str:
    documents, together = tokens.documents - tokens.empty, data.format.together
    sizes = targets_of(tokens.offsets, chosen).reshape(-1, together).sum(axis=1)
    if sizes.any():
        what = "documents" if together == 1 else f"groups of {together} documents"
        of = "" if len(chosen) == tokens.documents else f"{name} "
        others = ", or data.longer=cut or split would do" if together == 1 else " would do"
        return (
            f"data.length is {data.length}, and all {(sizes > 0).sum():,} {of}{what} of "
            f"data.source are longer, the shortest of {sizes[sizes > 0].min():,} tokens; "
            f"a longer row{others}"
        )
    if name == "train":
        held_out = data.validation + data.test
        return (
            f"data.validation and data.test hold out {held_out:g} of {documents:,} documents of "
            "data.source, which leaves none to train on; hold out less"
        )
    return (
        f"data.{name} is {getattr(data, name):g}, and none of the {documents:,} documents of "
        "data.source with text fell into that share; take a larger one, or make shorter documents "
        "of the same text"
    )
