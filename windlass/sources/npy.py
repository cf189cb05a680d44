"""Token ids in NumPy's own files, made by a vocabulary elsewhere."""

import math
from functools import cached_property
from tokenize import TokenError
from typing import Any, ClassVar

import numpy as np

from windlass.config import section
from windlass.errors import UserError
from windlass.sources import Files, Reader, SourceFile, files

IDS_AT_ONCE = 2**22  # in memory, while the ends of documents are looked for


@section
class Source(Files):
    """Token ids in .npy files, taken as they are: nothing is put in front of them or behind.

    An array of rows has a document in each. One long array is cut behind each `eos`, or at
    `offsets`. The tokenizer of the recipe is the one that made the ids.
    """

    yields: ClassVar[str] = "tokens"
    suffix: ClassVar[str] = ".npy"

    path: str  # a file, a folder or a pattern such as tokens/*.npy, or a URL of these
    eos: int | None = None  # one long array: the id that ends a document
    offsets: str | None = None  # one long array: a .npy file of where each document begins

    @property
    def total(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, begin, end = self._spans[index].tolist()
        return {"tokens": self._arrays[number].part(begin, end)}

    def stamped(self) -> list[SourceFile]:
        more = (
            [] if self.offsets is None else files(self.offsets, self.suffix, "data.source.offsets")
        )
        return [*files(self.path, self.suffix), *more]

    @cached_property
    def _arrays(self) -> list["Ids"]:
        return [Ids(file, self.reader) for file in self.files]

    @cached_property
    def _spans(self) -> np.ndarray:
        spans, documents = [np.zeros((0, 3), np.int64)], 0
        for number, ids in enumerate(self._arrays):
            begins = self._begins(ids)
            ends = np.append(begins[1:], ids.size)
            of_file = np.stack([np.full(len(begins), number), begins, ends], 1)
            spans.append(of_file[ends > begins])
            documents += len(spans[-1])
            if self.limit is not None and documents >= self.limit:
                break
        return np.concatenate(spans)

    def _begins(self, ids: "Ids") -> np.ndarray:
        """Starts of the documents of a file."""
        cuts = [name for name in ("eos", "offsets") if getattr(self, name) is not None]
        if len(ids.shape) == 2:
            if cuts:
                raise UserError(
                    f"{ids.file} holds {ids.shape[0]:,} rows of {ids.shape[1]:,} ids, each a "
                    f"document; data.source.{cuts[0]} is for one long array: leave it out"
                )
            return np.arange(ids.shape[0]) * ids.shape[1]
        if len(cuts) != 1:
            has = "has both of them" if cuts else "has neither"
            raise UserError(
                f"{ids.file} holds one long array of {ids.size:,} ids; data.source.eos says which "
                "of them ends a document, or data.source.offsets names a .npy file of where each "
                f"begins, and this recipe {has}"
            )
        return self._behind_ends(ids) if self.offsets is None else self._at_offsets(ids)

    def _behind_ends(self, ids: "Ids") -> np.ndarray:
        begins = [np.zeros(1, np.int64)]
        for begin in range(0, ids.size, IDS_AT_ONCE):
            part = ids.part(begin, min(begin + IDS_AT_ONCE, ids.size))
            begins.append(begin + 1 + np.flatnonzero(part == self.eos))
        return np.concatenate(begins)

    def _at_offsets(self, ids: "Ids") -> np.ndarray:
        assert self.offsets is not None
        file, *others = files(self.offsets, self.suffix, "data.source.offsets")
        if others or len(self._arrays) > 1:
            raise UserError(
                f"data.source.offsets is {self.offsets} and data.source.path is {self.path}; each "
                f"names one file, and these are {1 + len(others)} and {len(self._arrays)}"
            )
        offsets = Ids(file, self.reader)
        begins = offsets.part(0, offsets.size).astype(np.int64)
        is_in_order = (np.diff(begins) >= 0).all() and len(begins) > 0 and begins[0] == 0
        if len(offsets.shape) != 1 or not is_in_order or begins[-1] > ids.size:
            raise UserError(
                f"{file} does not say where documents begin in {ids.file}: the first of its "
                f"numbers is 0, none is below the one before it or above {ids.size:,}"
            )
        return begins


class Ids:
    """The whole numbers of one file as one long array, of which parts are read as needed."""

    def __init__(self, file: SourceFile, reader: Reader):
        self.file, self._reader = file, reader
        with file.open() as opened:
            try:
                version = np.lib.format.read_magic(opened)
                header = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version](opened)
            # The header is the text of a Python literal, and may be any.
            except (ValueError, LookupError, TypeError, RecursionError, MemoryError, TokenError):
                raise UserError(
                    f"{file} is not a .npy file, the kind that numpy.save writes"
                ) from None
            self._at = opened.tell()
        self.shape, is_transposed, self.dtype = header
        self.size = math.prod(self.shape)
        if not np.issubdtype(self.dtype, np.integer):
            raise UserError(f"{file} holds {self.dtype}; token ids are whole numbers")
        if len(self.shape) not in (1, 2) or min(self.shape) < 0:
            raise UserError(
                f"{file} holds an array of shape {self.shape}; token ids are one long array, or "
                "rows of one length"
            )
        if is_transposed and len(self.shape) == 2:
            raise UserError(
                f"{file} holds its columns one after the other; "
                "numpy.ascontiguousarray puts rows in their place"
            )
        if file.size < self._at + self.size * self.dtype.itemsize:
            raise UserError(f"{file} is cut short: it says that it holds {self.size:,} ids")

    def part(self, begin: int, end: int) -> np.ndarray:
        if self.file.system is None:
            return self._mapped[begin:end]
        size = self.dtype.itemsize
        raw = self._reader.read(self.file, self._at + begin * size, self._at + end * size)
        return np.frombuffer(raw, self.dtype)

    @cached_property
    def _mapped(self) -> np.ndarray:
        if not self.size:
            return np.zeros(0, self.dtype)
        mapped = np.memmap(self.file.name, self.dtype, "r", self._at, (self.size,))
        return mapped.view(np.ndarray)
