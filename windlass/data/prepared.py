"""Prepared data: the rows of every split, ready to be read by number."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from windlass import markup
from windlass.columns import Column
from windlass.data.corpus import Corpus
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.section import Data
from windlass.data.split import Split
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.teacher_cache import TeacherCache

SEEN = 64  # rows of blocks that show if their targets are the next tokens


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data of a run, whatever it was made of."""

    data: Data
    splits: dict[str, Split] = field(repr=False)
    drawn: int | None = None  # rows that are trained on in the whole run, where that is known
    cache: TeacherCache | None = None  # of a teacher, where it is joined to the rows

    def _repr_html_(self) -> str:
        """Table of its splits, for a notebook."""
        rows = [[name, f"{len(one):,}", f"{one.length:,}"] for name, one in self.splits.items()]
        return markup.table(["split", "rows", "length"], rows)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of the tokens; None: there is no text behind the rows."""
        raise NotImplementedError

    @property
    def vocab(self) -> int | None:
        """Vocabulary size that a model must embed; None: not known."""
        raise NotImplementedError

    @property
    def identifiers(self) -> int | None:
        """Identifiers of rows that a model must embed, where it embeds any; None: not known."""
        return None

    @property
    def has_next_tokens(self) -> bool:
        """Presence of targets that are the next tokens of their own rows."""
        return True

    @property
    def fingerprint(self) -> str:
        """Hash of the content: the same data gives the same one, wherever it is stored."""
        raise NotImplementedError

    @property
    def folders(self) -> list[Path]:
        """Folders of the cache with what was prepared, each of them sealed."""
        return []

    @property
    def commit(self) -> str | None:
        """Commit of the repository that is streamed; None: there is none."""
        return None

    @property
    def unigram_entropy(self) -> float | None:
        """Unigram entropy in nats: the loss of a model that knows token frequencies and no more."""
        return None

    @property
    def is_weighted(self) -> bool:
        """Presence of loss weights: some tokens are read and not trained on, or weigh less."""
        return False

    @property
    def columns(self) -> dict[str, Column]:
        return self.splits["train"].columns

    def split(self, name: str) -> Split:
        if name not in self.splits:
            noun = "rows" if self.data.has_blocks else "documents"
            raise UserError(f"there are no {name} {noun}; data.{name}=0.05 holds out one in twenty")
        return self.splits[name]

    def _joined(self, parts: list[str]) -> str:
        """The fingerprint of all parts, in the shares that they are drawn in."""
        if self.data.mixture is None:
            return parts[0]
        shares = [part.share for part in self.data.parts]
        return hashlib.sha256(repr([parts, shares]).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Tokenized(Prepared):
    """Documents as tokens in the cache, split and packed into sequences."""

    corpora: tuple[Corpus, ...] = ()  # of each source

    @property
    def vocabulary(self) -> Vocabulary:
        return self.corpora[0].vocabulary

    @property
    def vocab(self) -> int:
        return self.vocabulary.size

    @property
    def fingerprint(self) -> str:
        return self._joined([corpus.fingerprint for corpus in self.corpora])

    @property
    def folders(self) -> list[Path]:
        rows = [part.folder for name in self.splits for part in self.parts(name)]
        taught = [] if self.cache is None else [self.cache.folder]
        return [*(corpus.folder for corpus in self.corpora), *rows, *taught]

    @property
    def unigram_entropy(self) -> float:
        share = self.frequencies[self.frequencies > 0]
        return float(-(share * np.log(share)).sum())

    @property
    def is_weighted(self) -> bool:
        return any(corpus.weights is not None for corpus in self.corpora)

    @cached_property
    def frequencies(self) -> np.ndarray:
        """The share of each token among all that are trained on, as sources are mixed."""
        trained = self.parts("train")
        pairs = zip(self.data.parts, trained, strict=True)
        weights = [part.share * rows.tokens_per_row for part, rows in pairs]
        counts = [rows.counts / rows.counts.sum() for rows in trained]
        return np.average(counts, axis=0, weights=weights)

    def split(self, name: str) -> Sequences | Mixture:
        rows = super().split(name)
        assert isinstance(rows, Sequences | Mixture)
        return rows

    def parts(self, name: str) -> tuple[Sequences, ...]:
        """The packed sequences of each source."""
        rows = self.split(name)
        parts = rows.parts if isinstance(rows, Mixture) else (rows,)
        return tuple(part for part in parts if isinstance(part, Sequences))


@dataclass(frozen=True, eq=False)
class Untokenized(Prepared):
    """Blocks: rows as their sources have them. A vocabulary is for whoever turns them into text."""

    text: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self.text

    @property
    def vocab(self) -> int | None:
        sizes = [part.source.vocab for part in self.data.parts]
        sizes += [] if self.text is None else [self.text.size]
        return max((size for size in sizes if size is not None), default=None)

    @property
    def identifiers(self) -> int | None:
        counts = [part.source.identifiers for part in self.data.parts]
        return max((count for count in counts if count is not None), default=None)

    @cached_property
    def has_next_tokens(self) -> bool:
        if "targets" not in self.columns:
            return True
        rows = self.split("train")
        return any(map(_is_shifted, rows.parts if isinstance(rows, Mixture) else [rows]))

    @property
    def fingerprint(self) -> str:
        each = [(part.source.fingerprint(), str(self.columns)) for part in self.data.parts]
        return self._joined([hashlib.sha256(repr(one).encode()).hexdigest() for one in each])


def _is_shifted(rows: Split) -> bool:
    """Return True if in the first rows each target is the token behind it."""
    batch = rows.batch(range(min(SEEN, len(rows))))
    is_asked = batch["weight"][:, :-1] > 0 if "weight" in batch else True
    is_same = batch["targets"][:, :-1] == batch["tokens"][:, 1:]
    return bool(np.any(is_asked) and np.all(is_same | ~np.asarray(is_asked)))
