"""From documents to rows of tokens: tokenise, cache, split, pack, load."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from windlass.config import Open, section
from windlass.data.cache import Corpus, corpus
from windlass.data.pack import Packing, Rows, rows
from windlass.data.split import SPLITS, split
from windlass.data.tokenizer import Tokeniser, Tokenizer
from windlass.errors import UserError


@section
class Data:
    """What is trained on, and in what rows."""

    source: Annotated[Any, Open("windlass.sources", tag="kind", attribute="Source")]
    length: int  # tokens in a row
    packing: Packing = "documents"  # none: one document, or a piece of one, in each row
    shuffle: bool = True  # anew in every epoch
    validation: float = 0.0  # the share of documents held out
    test: float = 0.0  # a second share, for `windlass evaluate --split test`
    cache: str | None = None  # null: $WINDLASS_CACHE, or ~/.cache/windlass

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length is {self.length}; a row holds at least 1 token")
        for name in ("validation", "test"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it is a share, from 0 to below 1"
                )
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation is {self.validation} and test is {self.test}; "
                "together they leave nothing to train on"
            )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A corpus in the cache, and its documents parted into splits."""

    data: Data
    corpus: Corpus
    splits: dict[str, Rows] = field(repr=False)

    @property
    def tokeniser(self) -> Tokeniser:
        return self.corpus.tokeniser

    @property
    def fingerprint(self) -> str:
        """Of the documents: the same text gives the same one, wherever it is kept."""
        return self.corpus.fingerprint

    @property
    def counts(self) -> np.ndarray:
        """How often each token is to be predicted, in the whole corpus."""
        return self.corpus.counts

    @property
    def unigram_entropy(self) -> float:
        """Nats per token: the loss of a model that knows how common each token is and no more."""
        share = self.counts[self.counts > 0] / self.counts.sum()
        return float(-(share * np.log(share)).sum())

    def split(self, name: str) -> Rows:
        if name not in self.splits:
            raise UserError(
                f"there are no {name} documents; data.{name}=0.05 holds out one in twenty"
            )
        return self.splits[name]


def prepare(data: Data, tokenizer: Tokenizer, *, console: Console | None = None) -> Prepared:
    """Tokenises and packs what is not yet in the cache, and opens it."""
    console = console or Console(stderr=True)
    tokens = corpus(data.source, tokenizer, _cache(data), console)
    parts = split(tokens.documents, validation=data.validation, test=data.test)
    splits: dict[str, Rows] = {}
    for name in SPLITS:
        if name != "train" and not getattr(data, name):
            continue
        splits[name] = rows(tokens, parts[name], data.length, data.packing, console)
        if not len(splits[name]):
            raise UserError(_nothing_in(name, data, tokens))
    return Prepared(data, tokens, splits)


def _cache(data: Data) -> Path:
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


def _nothing_in(name: str, data: Data, tokens: Corpus) -> str:
    documents = tokens.documents - tokens.empty
    if name == "train":
        held_out = data.validation + data.test
        return (
            f"data.validation and data.test hold out {held_out:g} of {documents:,} documents, "
            "which leaves none to train on; hold out less"
        )
    return (
        f"data.{name} is {getattr(data, name):g}, and none of the {documents:,} documents with "
        "text fell into that share; take a larger one, or make shorter documents of the same text"
    )
