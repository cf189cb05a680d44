"""Documents in packed rows: how many a row has, and how many those that a device has at once."""

from typing import NamedTuple

import numpy as np

from windlass.columns import DocumentsPerRow
from windlass.data.mix import Mixture
from windlass.data.pack import Sequences
from windlass.data.shuffle import permuted
from windlass.data.split import Split
from windlass.run.batches import Batches

DRAWN = 2**21  # rows of a run that are counted before it begins, which takes a second at most
TOGETHER = 2**16  # rows that are drawn at once


class Drawing(NamedTuple):
    """The rows that a run draws: how many a device has at once, and in which order."""

    batches: Batches
    steps: int
    seed: int
    shuffle: bool


def documents_per_row(rows: Split, drawing: Drawing | None = None) -> DocumentsPerRow | None:
    """Documents of rows, if that is known before all are read; None where it is not."""
    parts = rows.parts if isinstance(rows, Mixture) else (rows,)
    pieces = [part.pieces_per_row for part in parts if isinstance(part, Sequences)]
    if len(pieces) < len(parts):
        return None
    most = max(int(each.max()) for each in pieces)
    known = DocumentsPerRow(most, max(float(each.mean()) for each in pieces))
    if drawing is None or most == 1 or not _is_drawn(rows, drawing):
        return known
    drawn = _drawn(rows, np.concatenate(pieces), drawing)
    return known._replace(drawn=(drawing.batches.per_device, drawn))


def _is_drawn(rows: Split, drawing: Drawing) -> bool:
    size = drawing.batches.rows
    return size <= len(rows) and drawing.steps * size <= DRAWN


def _drawn(rows: Split, pieces: np.ndarray, drawing: Drawing) -> int:
    """Most documents that a device has at once, in any step."""
    together = max(1, TOGETHER // drawing.batches.rows)
    return max(
        int(_at_once(pieces[_numbers(rows, drawing, first, together)], drawing.batches).max())
        for first in range(0, drawing.steps, together)
    )


def _at_once(pieces: np.ndarray, batches: Batches) -> np.ndarray:
    """Documents of each microbatch of each device, whose rows are `accumulation` apart."""
    shape = (-1, batches.shards, batches.per_device, batches.accumulation)
    return pieces.reshape(shape).sum(axis=2)


def _numbers(rows: Split, drawing: Drawing, first: int, count: int) -> np.ndarray:
    """Numbers of the rows of some steps of a run, as `data.load.order` draws them."""
    size = drawing.batches.rows
    steps = np.arange(first, min(first + count, drawing.steps))[:, None]
    if isinstance(rows, Mixture):
        places = (steps * size + np.arange(size)).ravel()
        return rows.drawn(places, drawing.seed, drawing.shuffle).numbers
    epoch, batch = np.divmod(steps, len(rows) // size)
    found = batch * size + np.arange(size)
    if drawing.shuffle:
        for one in np.unique(epoch).tolist():
            now = epoch[:, 0] == one
            found[now] = permuted(found[now], len(rows), seed=drawing.seed, epoch=one)
    return found
