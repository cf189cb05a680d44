"""Data loader: the rows of step i, prefetched from disk and placed as sharded arrays."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from windlass.data.blocks import BlockRows
from windlass.data.mix import Mixture
from windlass.data.shuffle import permuted
from windlass.data.split import Drawn, Split
from windlass.data.streams.rows import StreamedRows
from windlass.data.worker import Make, making
from windlass.errors import UserError
from windlass.processes.exclusive import EXCLUSIVE

# The layout of a column of a batch, from its shape and its name.
Placement = Callable[[tuple[int, ...], str], Sharding]
Batch = dict[str, jax.Array]

AHEAD = 4  # batches, unless a recipe says otherwise
ENDLESS = 2**62  # steps
SHUFFLED = 4096  # rows whose places are drawn at once: for the few of a batch it takes as long


def order(rows: Split, batch: int, seed: int, shuffle: bool) -> grain.MapDataset:
    """The rows of every step, without end: an epoch of all of them, and again, anew each time.

    What is left of an epoch after its last full batch is dropped; shuffled, it is another part of
    the rows in each epoch. A mixture drops nothing: its parts end at different times. A stream does
    so part by part.
    """
    count = len(rows)
    batches = count // batch
    together = max(1, SHUFFLED // batch)

    @functools.lru_cache(maxsize=2)
    def shuffled(epoch: int, first: int) -> np.ndarray:
        """The rows of some batches of an epoch, from `first` on."""
        places = np.arange(first * batch, min(first + together, batches) * batch)
        return permuted(places, count, seed=seed, epoch=epoch)

    def drawn(step: int) -> Drawn:
        if isinstance(rows, Mixture):
            return rows.drawn(int(step) * batch + np.arange(batch), seed, shuffle)
        if isinstance(rows, StreamedRows):
            return rows.drawn(int(step), batch, seed, shuffle)
        epoch, number = divmod(int(step), batches)
        numbers = np.arange(number * batch, (number + 1) * batch)
        if shuffle:
            first = number // together * together
            numbers = shuffled(epoch, first)[numbers - first * batch]
        return Drawn(numbers, np.full(batch, epoch), seed)

    return grain.MapDataset.range(ENDLESS).map(drawn)


class Loader:
    """Batches to train on; batch i follows from the seed and i alone.

    Neither the number of workers nor how many batches are made ahead changes a bit of any.
    """

    def __init__(
        self,
        rows: Split,
        batch: int,
        seed: int,
        shuffle: bool,
        *,
        workers: int = 0,
        prefetch: int = AHEAD,
    ):
        if len(rows) < batch:
            raise UserError(_too_few(rows, batch))
        self.rows, self.size = rows, batch
        self.workers, self.prefetch = workers, prefetch
        batches, left = divmod(len(rows), batch)
        self.dropped = 0 if isinstance(rows, Mixture | StreamedRows) else left
        # None: of a stream, whose end is not known.
        self.batches_per_epoch = None if isinstance(rows, StreamedRows) else batches
        self._order = order(rows, batch, seed, shuffle)

    def row_numbers(self, step: int) -> np.ndarray:
        return self._drawn(step).numbers

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The whole batch, on the host."""
        return self.rows.batch(*self._drawn(step))

    def arriving(self, steps: int) -> AbstractContextManager[None]:
        """A block in which a stream's parts arrive ahead of their use, for so many steps."""
        rows = self.rows
        return rows.arriving(steps) if isinstance(rows, StreamedRows) else nullcontext()

    def progress(self, done: int) -> dict[str, int]:
        """Metrics of a stream after a step: which part it is of, and how far the data is ahead."""
        rows = self.rows
        return rows.progress(done, self.size) if isinstance(rows, StreamedRows) else {}

    def iterate(self, start: int, placement: Placement) -> Iterator[Batch]:
        """Batches from step `start` on, made ahead of their use."""
        with making(self.rows, self.workers) as make:
            threads = max(1, self.workers) if self.prefetch else 0
            ahead = max(self.prefetch, threads)  # a worker that makes nothing ahead would be idle
            options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
            shapes = shapes_of(self.rows, self.size)
            yield from _iterate(self._order[start:], shapes, make, placement, options)

    def _drawn(self, step: int) -> Drawn:
        drawn = self._order[step]
        assert isinstance(drawn, Drawn)
        return drawn


def _too_few(rows: Split, batch: int) -> str:
    has = f"train.batch is {batch} and there are {len(rows)} rows"
    would = f"to train on; a batch of {len(rows)}"
    if isinstance(rows.parts[0] if isinstance(rows, Mixture) else rows, BlockRows):
        return f"{has} {would} or more rows would do"
    if isinstance(rows, StreamedRows):
        return (
            f"{has} of {rows.length} tokens in the first part of the stream; a batch of "
            f"{len(rows)}, or a larger data.source.part_tokens would do"
        )
    return (
        f"{has} of {rows.length} tokens {would}, shorter rows (data.length) or more documents "
        "would do"
    )


def shapes_of(rows: Split, batch: int) -> dict[str, tuple[int, ...]]:
    """The shape of every column of a batch."""
    return {name: column.shape(batch) for name, column in rows.columns.items()}


def evaluation_batches(
    rows: Split, batch: int, placement: Placement, *, prefetch: int = AHEAD
) -> Iterator[Batch]:
    """Every row once, in order and in no epoch; the last batch is filled up with padding."""
    shapes = shapes_of(rows, batch)
    return numbered_batches(np.arange(len(rows)), shapes, rows.batch, placement, prefetch=prefetch)


def numbered_batches(
    numbers: np.ndarray,
    shapes: dict[str, tuple[int, ...]],
    make: Make,
    placement: Placement,
    *,
    prefetch: int = AHEAD,
) -> Iterator[Batch]:
    """Batches of these shapes that `make` makes of rows by number, filled up with padding."""
    batch = next(iter(shapes.values()))[0]
    padded = np.pad(numbers, (0, -len(numbers) % batch), constant_values=-1).reshape(-1, batch)
    options = grain.ReadOptions(num_threads=int(prefetch > 0), prefetch_buffer_size=prefetch)
    source = grain.MapDataset.source(list(padded)).map(Drawn)
    return _iterate(source, shapes, make, placement, options)


def _iterate(
    dataset: grain.MapDataset,
    shapes: dict[str, tuple[int, ...]],
    make: Make,
    placement: Placement,
    options: grain.ReadOptions,
) -> Iterator[Batch]:
    batches = dataset.map(lambda drawn: _placed(drawn, shapes, make, placement))
    return iter(batches.to_iter_dataset(options))


def _placed(
    drawn: Drawn, shapes: dict[str, tuple[int, ...]], make: Make, placement: Placement
) -> Batch:
    """The addressable rows of a batch, made once for all columns and devices of this process."""
    places = {name: placement(shape, name) for name, shape in shapes.items()}
    indices = [
        index
        for name, place in places.items()
        for index in place.addressable_devices_indices_map(shapes[name]).values()
    ]
    count = len(drawn.numbers)
    mine = addressable_rows(indices, count)
    epochs = None if drawn.epochs is None else drawn.epochs[mine]
    columns = make(drawn.numbers[mine], epochs, drawn.seed)

    def part(name: str, index: Any) -> np.ndarray:
        some, *others = index
        # All rows of a shard are here, and so stand together: a view of them does.
        first, size = np.searchsorted(mine, some.start or 0), len(range(*some.indices(count)))
        return columns[name][(slice(first, first + size), *others)]

    with EXCLUSIVE:
        placed = {
            name: jax.make_array_from_callback(shapes[name], place, functools.partial(part, name))
            for name, place in places.items()
        }
        return jax.block_until_ready(placed)


def addressable_rows(indices: Iterable[Any], count: int) -> np.ndarray:
    """Numbers of the rows of a batch of `count` that any of these shard indices covers."""
    is_here = np.zeros(count, bool)
    for some, *_ in indices:
        is_here[some] = True
    return np.flatnonzero(is_here)
