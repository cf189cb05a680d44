"""From rows on disk to sharded arrays: which rows make step i, and getting them there in time."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from windlass.data.mix import Mixture
from windlass.data.pack import Rows
from windlass.data.shuffle import permuted
from windlass.data.worker import Make, making
from windlass.errors import UserError
from windlass.processes.exclusive import ALONE

# The layout of a column of a batch, from its shape and its name.
Placement = Callable[[tuple[int, ...], str], Sharding]
Batch = dict[str, jax.Array]

AHEAD = 4  # batches, unless a recipe says otherwise
ENDLESS = 2**62  # steps


def order(rows: Rows | Mixture, batch: int, seed: int, shuffle: bool) -> grain.MapDataset:
    """The numbers of the rows of every step, without end: all of them, and again, anew each time.

    What is left of an epoch after its last full batch is dropped; shuffled, it is another part of
    the rows in each epoch. A mixture drops nothing: its parts end at different times.
    """
    count = len(rows)
    batches = count // batch

    def numbers(step: int) -> np.ndarray:
        if isinstance(rows, Mixture):
            return rows.drawn(int(step) * batch + np.arange(batch), seed, shuffle)
        epoch, number = divmod(int(step), batches)
        places = np.arange(number * batch, (number + 1) * batch)
        return permuted(places, count, seed=seed, epoch=epoch) if shuffle else places

    return grain.MapDataset.range(ENDLESS).map(numbers)


class Loader:
    """Batches to train on; batch i follows from the seed and i alone.

    Neither the number of workers nor how many batches are made ahead changes a bit of any.
    """

    def __init__(
        self,
        rows: Rows | Mixture,
        batch: int,
        seed: int,
        shuffle: bool,
        *,
        workers: int = 0,
        prefetch: int = AHEAD,
    ):
        if len(rows) < batch:
            raise UserError(
                f"train.batch is {batch} and there are {len(rows)} rows of {rows.length} tokens "
                f"to train on; a batch of {len(rows)}, shorter rows (data.length) or more "
                "documents would do"
            )
        self.rows, self.size = rows, batch
        self.workers, self.prefetch = workers, prefetch
        self.batches_per_epoch, left = divmod(len(rows), batch)
        self.dropped = 0 if isinstance(rows, Mixture) else left
        self._order = order(rows, batch, seed, shuffle)

    def row_numbers(self, step: int) -> np.ndarray:
        return np.asarray(self._order[step])

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The whole batch, on the host."""
        return self.rows.batch(self.row_numbers(step))

    def iterate(self, start: int, placement: Placement) -> Iterator[Batch]:
        """Batches from step `start` on, made ahead of their use."""
        with making(self.rows, self.workers) as make:
            wanted = dict.fromkeys(self.rows.columns, (self.size, self.rows.length))
            threads = max(1, self.workers) if self.prefetch else 0
            ahead = max(self.prefetch, threads)  # a worker that makes nothing ahead would be idle
            options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
            yield from _made(self._order[start:], wanted, make, placement, options)


def evaluation_batches(
    rows: Rows | Mixture, batch: int, placement: Placement, *, prefetch: int = AHEAD
) -> Iterator[Batch]:
    """Every row once, in order; the last batch is filled up with rows of weight 0."""
    numbers = np.arange(len(rows) + -len(rows) % batch).reshape(-1, batch)
    numbers[numbers >= len(rows)] = -1
    options = grain.ReadOptions(num_threads=int(prefetch > 0), prefetch_buffer_size=prefetch)
    source = grain.MapDataset.source(list(numbers))
    wanted = dict.fromkeys(rows.columns, (batch, rows.length))
    return _made(source, wanted, rows.batch, placement, options)


def _made(
    numbers: grain.MapDataset,
    wanted: dict[str, tuple[int, int]],
    make: Make,
    placement: Placement,
    options: grain.ReadOptions,
) -> Iterator[Batch]:
    batches = numbers.map(lambda some: _placed(some, wanted, make, placement))
    return iter(batches.to_iter_dataset(options))


def _placed(
    numbers: np.ndarray, wanted: dict[str, tuple[int, int]], make: Make, placement: Placement
) -> Batch:
    """The rows that the devices of this process hold, made once for all columns and devices."""
    places = {name: placement(shape, name) for name, shape in wanted.items()}
    indices = [
        index
        for name, place in places.items()
        for index in place.addressable_devices_indices_map(wanted[name]).values()
    ]
    mine = held(indices, len(numbers))
    columns = make(numbers[mine])

    def part(name: str, index: Any) -> np.ndarray:
        some, along = index
        which = np.searchsorted(mine, np.arange(len(numbers))[some])
        return columns[name][which, along]

    with ALONE:
        placed = {
            name: jax.make_array_from_callback(wanted[name], place, functools.partial(part, name))
            for name, place in places.items()
        }
        return jax.block_until_ready(placed)


def held(indices: Iterable[Any], count: int) -> np.ndarray:
    """Which of so many rows are in any of these parts of a batch."""
    rows = np.zeros(count, bool)
    for some, _ in indices:
        rows[some] = True
    return np.flatnonzero(rows)
