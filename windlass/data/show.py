"""Rows as the model sees them, on a terminal."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.data import Prepared, Tokenized
from windlass.data.blocks import BlockRows
from windlass.data.mix import Mixture
from windlass.data.split import Split
from windlass.data.vocabulary import Vocabulary

LONGER = {"split": "split over several", "cut": "cut", "drop": "dropped"}
COLORS = ("cyan", "yellow", "green", "magenta")  # neighbouring documents in a row differ


def show(prepared: Prepared, rows: Split, console: Console, count: int) -> None:
    """The first rows: documents in colours, what is not trained on dimmed; then the counts."""
    for number in range(min(count, len(rows))):
        if isinstance(prepared, Tokenized):
            console.print(row(rows, number, prepared.vocabulary))
        else:
            console.print(block(prepared, rows, number))
        console.print()
    if lines := list(facts(prepared)):
        checked = Table(show_header=False)
        for line in lines:
            checked.add_row(*line)
        console.print(checked)
    console.print(table(prepared))
    if isinstance(trained := prepared.split("train"), Mixture):
        console.print(parts(prepared, trained))


def summary(rows: Split) -> str:
    """The rows that are trained on, in a line."""
    if isinstance(_first(rows), BlockRows):
        return f"{len(rows):,} rows of {', '.join(rows.columns)}"
    packed: Any = rows
    masked = f" of {packed.targets:,} trained on" if packed.tokens < packed.targets else ""
    full = f"{packed.efficiency:.1%} full"
    return f"{packed.tokens:,} tokens{masked} in {len(rows):,} rows ({full})"


def block(prepared: Prepared, rows: Split, number: int) -> Text:
    """A row of blocks, as evaluation reads it and as its source prints it."""
    columns = {name: values[0] for name, values in rows.batch([number]).items()}
    shown = Text().append(f"row {number}\n", "bold")
    if prepared.vocabulary is not None and "tokens" in columns:
        shown.append(prepared.vocabulary.decode(columns["tokens"]) + "\n", COLORS[0])
    source = prepared.data.parts[0].source
    if isinstance(rows, Mixture):
        source = prepared.data.parts[rows.part_of(number)].source
    return shown.append(source.shown(columns))


def facts(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """Counts of the checked examples of each source, by name."""
    if not isinstance(prepared, Tokenized):
        return
    every = zip(*(prepared.parts(name) for name in prepared.splits), strict=True)
    for part, splits in zip(prepared.data.parts, every, strict=True):
        rows, *_ = splits
        checked = rows.corpus.checked
        if checked is None:
            continue
        several = "" if prepared.data.mixture is None else f"{part.key}: "
        kept = len(np.unique(np.concatenate([one.examples for one in splits])))
        for name, value in checked.lines(kept):
            yield name, f"{several}{value}"
        longest = int(np.diff(rows.corpus.offsets).max())
        text = f"{longest:,} tokens, with {rows.tokens:,} in all to train on"
        if longer := sum(one.longer for one in splits):
            done = LONGER[prepared.data.lengthy]
            text += f"; {longer:,} longer than data.length ({rows.length:,}) are {done}"
        yield "longest", f"{several}{text}"


def row(rows: Any, number: int, vocabulary: Vocabulary) -> Text:
    """A packed sequence, piece by piece."""
    columns = rows[number]
    shown = Text().append(f"row {number}\n", "bold")
    for place, piece in enumerate(rows.pieces(number)):
        here = columns["document"] == place
        # What is read first, then everything predicted: each token of the piece once.
        tokens = [columns["tokens"][here][0], *columns["targets"][here]]
        is_trained = [False, *(columns["weight"][here] > 0)]
        color = COLORS[place % len(COLORS)]
        shown.append(f"document {piece.document}, tokens {piece.start} to {piece.stop}: ", "bold")
        for text, trained in _runs(tokens, is_trained, vocabulary):
            shown.append(text, color if trained else "dim")
        shown.append("\n")
    padding = int((columns["document"] < 0).sum())
    shown.append(f"{padding} of {rows.length} positions padded", "dim")
    return shown


def table(prepared: Prepared) -> Table:
    """Table of the splits and their sizes."""
    if isinstance(prepared, Tokenized):
        return _packed(prepared)
    shown = Table("split", "rows")
    shown.columns[1].justify = "right"
    for name, rows in prepared.splits.items():
        shown.add_row(name, f"{len(rows):,}")
    return shown


def _packed(prepared: Tokenized) -> Table:
    shown = Table("split", "documents", "sequences", "tokens", "of all positions")
    splits: dict[str, Any] = dict(prepared.splits)
    is_masked = any(rows.tokens < rows.targets for rows in splits.values())
    is_short = any(rows.longer for rows in splits.values())
    if is_masked:
        shown.add_column("trained on")
    if is_short:
        shown.add_column(f"longer, {LONGER[prepared.data.lengthy]}")
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, rows in splits.items():
        numbers = [f"{value:,}" for value in (rows.documents, len(rows), rows.targets)]
        masked = [f"{rows.tokens / rows.targets:.1%}"] if is_masked else []
        longer = [f"{rows.longer:,}"] if is_short else []
        shown.add_row(name, *numbers, f"{rows.efficiency:.1%}", *masked, *longer)
    return shown


def parts(prepared: Prepared, trained: Mixture) -> Table:
    """Table of the parts of a mixture, and the epochs that a run makes of each."""
    counts = {"rows": len}
    if isinstance(prepared, Tokenized):
        of = {"documents": lambda rows: rows.documents, "sequences": len}
        counts = of | {"tokens": lambda rows: rows.tokens}
    shown = Table("part", "kind", "share", *counts, "epochs")
    shown.columns[0].overflow = "fold"  # a path is of use when it is whole
    for column in shown.columns[2:]:
        column.justify = "right"
    for number, (part, rows) in enumerate(zip(prepared.data.parts, trained.parts, strict=True)):
        kind, path = part.source.described()["kind"], getattr(part.source, "path", "")
        numbers = [f"{count(rows):,}" for count in counts.values()]
        epochs = ""
        if prepared.drawn is not None:
            epochs = f"{prepared.drawn * part.share / len(rows):.2f}"
        shown.add_row(f"{number} {path}".rstrip(), kind, f"{part.share:.1%}", *numbers, epochs)
    return shown


def _first(rows: Split) -> Split:
    return rows.parts[0] if isinstance(rows, Mixture) else rows


def _runs(tokens: list, is_trained: list, vocabulary: Vocabulary) -> list[tuple[str, bool]]:
    """The text between changes of what is trained on; special tokens by their names."""
    runs: list[tuple[str, bool]] = []
    pending: list[int] = []

    def flush(trained: bool) -> None:
        if pending:
            runs.append((vocabulary.decode(pending), trained))
            pending.clear()

    was_trained = False
    for token, trained in zip(map(int, tokens), map(bool, is_trained), strict=True):
        is_special = token in vocabulary.special
        if trained != was_trained or is_special:
            flush(was_trained)
        if is_special:
            runs.append((vocabulary.name(token), trained))
        else:
            pending.append(token)
        was_trained = trained
    flush(was_trained)
    return runs
