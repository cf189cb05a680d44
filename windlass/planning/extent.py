"""Length of a run, as far as it is known before it starts."""

from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from windlass.data import Data, prepare, rows_of_an_epoch
from windlass.errors import UserError
from windlass.program.described import Described
from windlass.program.length import Length
from windlass.run import Run


class Extent(NamedTuple):
    """Tokens and steps of a run; None where not known, and `unknown` says how to give it."""

    tokens: int  # per step: positions of its sequences, padded or not
    steps: int | None
    epoch_steps: int | None  # in which a run goes once over its data
    unknown: str | None = None

    @property
    def whole(self) -> int | None:
        """Tokens of the run."""
        return self.steps and self.steps * self.tokens


def extent(described: Described, rows: int | None = None, console: Console | None = None) -> Extent:
    """The length of a described run; `rows` are those of an epoch, where the user says it.

    Else they are those of the data, where it is in the cache. Only a run that is measured in epochs
    is worth tokenising what lies on this machine; nothing is fetched from elsewhere.
    """
    run, batch = described.run, described.batches.rows
    tokens = batch * run.data.length
    if run.data.is_streamed:
        return Extent(tokens, run.train.steps, None)
    why = None
    if rows is None:
        try:
            rows = _rows_of_epoch(run, console)
        except UserError as refused:  # a tokenizer that cannot be had, for one
            why = f": {refused}"
    if rows is None:
        why = why or f", as the data is {'not tokenized yet' if _is_here(run.data) else 'remote'}"
        unknown = f"the number of sequences per epoch is not known{why}; --rows N gives it"
        return Extent(tokens, run.train.steps, None, unknown)
    if rows < batch:
        unknown = (
            f"the data has {rows:,} sequences, less than a batch of {batch:,}; --rows N gives more"
        )
        return Extent(tokens, run.train.steps, None, unknown)
    length = Length.of(run.train, rows // batch)
    return Extent(tokens, length.steps, length.per_epoch)


def _rows_of_epoch(run: Run, console: Console | None) -> int | None:
    if not _is_here(run.data):
        return None
    known = rows_of_an_epoch(run.data, run.tokenizer)
    if known is None and run.train.steps is None:
        prepared = prepare(run.data, run.tokenizer, console=console)
        return len(prepared.split("train"))
    return known


def _is_here(data: Data) -> bool:
    """Return True if all documents are on this machine."""
    return all(_is_local(part.source) for part in data.parts)


def _is_local(source: Any) -> bool:
    if hasattr(source, "path"):
        return "://" not in (source.path or "")  # null: generated
    is_hub = type(source).__module__.endswith(".hub")
    return not is_hub or Path(source.name).expanduser().is_dir()
