"""From rows on disk to sharded arrays: which rows make step i, and getting them there in time."""

from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from windlass.data.pack import COLUMNS, Rows
from windlass.data.shuffle import permuted
from windlass.errors import UserError

# The layout of a column of a batch, from its shape and its name.
Placement = Callable[[tuple[int, ...], str], Sharding]
Batch = dict[str, jax.Array]

BATCHES_AHEAD = 4
ENDLESS = 2**62  # steps


def order(rows: int, batch: int, seed: int, shuffle: bool) -> grain.MapDataset:
    """The numbers of the rows of every step, without end: all of them, and again, anew each time.

    What is left of an epoch after its last full batch is dropped; shuffled, it is another part of
    the rows in each epoch.
    """
    batches = rows // batch

    def numbers(step: int) -> np.ndarray:
        epoch, number = divmod(int(step), batches)
        places = np.arange(number * batch, (number + 1) * batch)
        return permuted(places, rows, seed=seed, epoch=epoch) if shuffle else places

    return grain.MapDataset.range(ENDLESS).map(numbers)


class Loader:
    """Batches to train on; batch i follows from the seed and i alone."""

    def __init__(self, rows: Rows, batch: int, seed: int, shuffle: bool):
        if len(rows) < batch:
            raise UserError(
                f"train.batch is {batch} and there are {len(rows)} rows of {rows.length} tokens "
                f"to train on; a batch of {len(rows)}, shorter rows (data.length) or more "
                "documents would do"
            )
        self.rows, self.size = rows, batch
        self.batches_per_epoch, self.dropped = divmod(len(rows), batch)
        self._order = order(len(rows), batch, seed, shuffle)

    def row_numbers(self, step: int) -> np.ndarray:
        return np.asarray(self._order[step])

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The whole batch, on the host."""
        return self.rows.batch(self.row_numbers(step))

    def iterate(self, start: int, placement: Placement) -> Iterator[Batch]:
        """Batches from step `start` on, read ahead of their use."""
        return _read_ahead(self._order[start:], self.rows, placement)


def evaluation_batches(rows: Rows, batch: int, placement: Placement) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with rows of weight 0."""
    numbers = np.arange(len(rows) + -len(rows) % batch).reshape(-1, batch)
    numbers[numbers >= len(rows)] = -1
    return _read_ahead(grain.MapDataset.source(list(numbers)), rows, placement)


def _read_ahead(numbers: grain.MapDataset, rows: Rows, placement: Placement) -> Iterator[Batch]:
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCHES_AHEAD)
    batches = numbers.map(lambda some: _placed(rows, some, placement))
    return iter(batches.to_iter_dataset(options))


def _placed(rows: Rows, numbers: np.ndarray, placement: Placement) -> Batch:
    """The rows that the devices of this process hold, read once for all columns and devices."""
    shape = (len(numbers), rows.length)
    held: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}

    def part(name: str, index: Any) -> np.ndarray:
        some, places = index
        which = some.indices(len(numbers))
        if which not in held:
            held[which] = rows.batch(numbers[some])
        return held[which][name][:, places]

    return {
        name: jax.make_array_from_callback(
            shape, placement(shape, name), lambda index, name=name: part(name, index)
        )
        for name in COLUMNS
    }
