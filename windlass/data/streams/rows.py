"""Packed sequences of a stream: by step, of whichever part that step is trained on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass import seal
from windlass.chance import mix
from windlass.columns import Column
from windlass.data import integrity
from windlass.data.pack import Packing, Piece, Sequences, sequences
from windlass.data.shuffle import permuted
from windlass.data.split import Arrays, Drawn, Numbers
from windlass.data.streams.arrivals import Arrivals
from windlass.data.streams.parts import PartFolder, Stream
from windlass.formats import Longer
from windlass.hub.download import Stopped
from windlass.terminal import Terminal
from windlass.units import count

OPENED = 2  # parts that are kept open: batches are made ahead, across the end of one
BETWEEN_LOOKS = 0.2  # seconds, for a part that another host makes


class PackingSettings(NamedTuple):
    """Packing of every part but the first, all of whose documents are trained on."""

    length: int
    stride: int
    packing: Packing
    longer: Longer
    together: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


class Place(NamedTuple):
    """The part that a step is trained on."""

    epoch: int
    part: int
    step: int  # of the part, from 0
    steps: int  # of the part


class StreamedRows:
    """The rows to train on of a stream, in the order of its parts.

    Step i is of part k, where parts 0 to k - 1 have too few full batches between them to reach it;
    in a part rows are shuffled, and what is left after its last full batch is dropped. Behind the
    last part the first begins again, shuffled anew: another epoch. So which rows a step has
    follows from the parts before it and the seed, whoever makes them and when.

    Before training only the first part is known: lengths and averages are of it.
    """

    def __init__(self, first: Sequences, folder: PartFolder, settings: PackingSettings):
        self.first, self.folder, self.settings = first, folder, settings
        self.waits = False  # for the first process, which makes the parts in a folder of all
        self._counts: list[int] = []  # rows of each part, as far as it is known
        self._opened: dict[int, Sequences] = {0: first}
        self._arrivals: Arrivals[Sequences] | None = None
        self._steps: int | None = None  # of the run
        self._ended: int | None = None  # number of parts, once that is known
        self._stop = threading.Event()
        # Of those who wait for a part; whoever asks for what is known need not wait for them.
        self._lock = threading.RLock()

    def __reduce__(self):
        # A worker opens what is there; parts are made by the process that trains.
        return _reopened, (self.first, self.folder.folder, self.settings)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self.first[number]

    @property
    def columns(self) -> dict[str, Column]:
        return self.first.columns

    @property
    def length(self) -> int:
        return self.first.length

    @property
    def tokens(self) -> int:
        return self.first.tokens

    @property
    def targets(self) -> int:
        return self.first.targets

    @property
    def documents(self) -> int:
        return self.first.documents

    @property
    def longer(self) -> int:
        return self.first.longer

    @property
    def efficiency(self) -> float:
        return self.first.efficiency

    @property
    def tokens_per_row(self) -> float:
        return self.first.tokens_per_row

    @property
    def targets_per_row(self) -> float:
        return self.first.targets_per_row

    def pieces(self, number: int) -> list[Piece]:
        return self.first.pieces(number)

    @property
    def parts(self) -> int | None:
        """Number of parts; None: the end has not been seen."""
        return self.folder.parts

    def batch(self, numbers: Numbers, epochs: np.ndarray | None = None, seed: int = 0) -> Arrays:
        """Several rows at once; the number -1 is a row of padding."""
        numbers = np.asarray(numbers, np.int64)
        whose = self._part_of(int(numbers.max(initial=0)))
        before = sum(self._counts[:whose])
        # A batch is of one part.
        return self._sequences(whose).batch(np.where(numbers < 0, -1, numbers - before))

    def drawn(self, step: int, batch: int, seed: int, shuffle: bool) -> Drawn:
        """The rows of a step; waits for the part that they are of."""
        with self._lock:
            epoch, part, number, steps = self.place(step, batch)
            rows = self._counts[part]
            places = np.arange(number * batch, (number + 1) * batch)
            if shuffle:
                own = _seed_of(seed, part)
                places = permuted(places, rows, seed=own, epoch=epoch)
            if self._arrivals is not None:
                self._sequences(part)
                if self._steps is None or step - number + steps < self._steps:
                    self._expect(part + 1)
            return Drawn(places + sum(self._counts[:part]), np.full(batch, epoch), seed)

    def place(self, step: int, batch: int) -> Place:
        """The part of a step, and which of its steps that is."""
        epoch = before = number = 0
        while True:
            rows = self._count(number)
            if rows is None:
                # The stream has ended, and begins again.
                epoch, step = divmod(step, before)
                before, number = 0, 0
                continue
            if step < before + rows // batch:
                return Place(epoch, number, step - before, rows // batch)
            before, number = before + rows // batch, number + 1

    @contextmanager
    def arriving(self, steps: int) -> Iterator[None]:
        """Make parts ahead of their use in this block, as far as a run of so many steps goes."""
        if not isinstance(self.folder, Stream):
            yield
            return
        self._steps = steps
        self._arrivals = Arrivals(self._made, self._report_waiting)
        try:
            yield
        finally:
            self._stop.set()
            self.folder.stop.set()
            self._arrivals.close()
            self._arrivals = None

    def progress(self, done: int, batch: int) -> dict[str, int]:
        """The part of the step that was done last, and the tokens that are here behind it."""
        place = self.place(done - 1, batch)
        left = (place.steps - 1 - place.step) * batch * self.tokens_per_row
        further = [self.folder.known(place.part + 1), self.folder.known(place.part + 2)]
        ahead = int(left) + sum(one.tokens for one in further if one is not None)
        if further[0] is None and isinstance(self.folder, Stream) and not self.waits:
            ahead += self.folder.arrived
        return {"data_part": place.part, "data_ahead_tokens": ahead}

    def described(self, part: int) -> str:
        """A part that training begins with, and the one that arrives, in a line."""
        known = self.folder.known(part)
        tokens = "" if known is None else f", {count(known.tokens)} tokens"
        line = f"training on part {part} of the data{tokens}"
        if self.parts is not None and part + 1 >= self.parts:
            return f"{line}, the last of {self.parts}; then the first begins again"
        if self.folder.known(part + 1) is not None:
            return f"{line}; part {part + 1} is here"
        if not isinstance(self.folder, Stream) or self.waits:
            return line
        return f"{line}; part {part + 1}: {self.folder.arriving}"

    def _expect(self, number: int) -> None:
        """Have a part made that is trained on next."""
        if self.parts is not None:
            number %= self.parts
        if number not in self._opened and self._arrivals is not None:
            self._arrivals.request(number)

    def _sequences(self, number: int) -> Sequences:
        """The rows of a part that there is."""
        if (opened := self._opened.get(number)) is None:
            with self._lock:
                opened = self._opened.get(number) or self._taken(number)
        assert opened is not None, f"there is no part {number}"
        return opened

    def _taken(self, number: int) -> Sequences | None:
        """A part, waited for or made here; older ones are closed, and deleted if not to be kept."""
        taken = self._made(number) if self._arrivals is None else self._arrivals.take(number)
        if taken is None:
            return None
        for older in [one for one in self._opened if one][: 1 - OPENED]:
            del self._opened[older]
        self._opened[number] = taken
        if isinstance(self.folder, Stream) and not self.waits:
            self.folder.delete_older(number)
        return taken

    def _count(self, number: int) -> int | None:
        """Rows of a part; None behind the end."""
        if number < len(self._counts):
            return self._counts[number]
        if self._ended is not None:
            return None
        with self._lock:
            while len(self._counts) <= number:
                rows = self._rows_of(len(self._counts))
                if rows is None:
                    self._ended = len(self._counts)
                    return None
                self._counts.append(rows)
            return self._counts[number]

    def _rows_of(self, number: int) -> int | None:
        if number == 0:
            return len(self.first)
        if (about := integrity.entry(self._about(number))) is not None:
            return about["rows"]
        if self.parts is not None and number >= self.parts:
            return None
        taken = self._taken(number)
        return None if taken is None else len(taken)

    def _part_of(self, row: int) -> int:
        number = before = 0
        while row >= before + (self._count(number) or 0):
            before, number = before + self._counts[number], number + 1
        return number

    def _about(self, number: int) -> Path:
        return self.folder.folder / "rows" / self.settings.name / f"{number:05}.json"

    def _made(self, number: int) -> Sequences | None:
        """The rows of a part, made where they are not there yet; None behind the end."""
        if number == 0:
            return self.first
        console: Any = Terminal(quiet=True)
        while self.waits and integrity.entry(self._about(number)) is None:
            if self.parts is not None and number >= self.parts:
                return None
            self._look_again()
        if isinstance(self.folder, Stream) and not self.waits:
            corpus, console = self.folder.make(number), self.folder.console
        else:
            while (corpus := self.folder.corpus(number)) is None and self.waits:
                self._look_again()
        if corpus is None:
            return None
        documents = np.arange(corpus.documents)
        how = self.settings._asdict()
        packed = sequences(corpus, documents, **how, is_once=False, console=console)
        if integrity.entry(self._about(number)) is None and not self.waits:
            seal.write_signed(self._about(number), {"rows": len(packed)})
        return packed

    def _look_again(self) -> None:
        if self._stop.wait(BETWEEN_LOOKS):
            raise Stopped

    def _report_waiting(self, number: int) -> None:
        if isinstance(self.folder, Stream):
            of = "" if self.waits else f": {self.folder.arriving}"
            self.folder.say(f"warning: training waits for part {number} of the data{of}")


def _reopened(first: Sequences, folder: Path, settings: PackingSettings) -> StreamedRows:
    return StreamedRows(first, PartFolder(folder), settings)


def _seed_of(seed: int, part: int) -> int:
    """A seed for each part: equal numbers of rows are not shuffled alike. The first has its own."""
    if not part:
        return seed
    return int(mix(mix(np.array([seed])) + np.uint64(part))[0] >> np.uint64(1))
