"""Splits: what is trained on and what is held out, and the rows of each by number."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from windlass.chance import mix
from windlass.columns import Column

SPLITS = ("train", "validation", "test")
Arrays = dict[str, np.ndarray]  # the columns of some rows
Numbers = np.ndarray | Sequence[int]  # of rows


class Drawn(NamedTuple):
    """The rows of a batch by number, -1 for padding; of training, in which epoch, by which seed."""

    numbers: np.ndarray
    epochs: np.ndarray | None = None
    seed: int = 0


@runtime_checkable
class Split(Protocol):
    """The rows of a split: packed sequences, blocks, or a mixture of either."""

    @property
    def columns(self) -> dict[str, Column]: ...

    @property
    def length(self) -> int: ...  # positions of a row

    @property
    def tokens_per_row(self) -> float | None: ...  # that are trained on; None: there are none

    @property
    def targets_per_row(self) -> float | None: ...  # those included that are only read

    def __len__(self) -> int: ...

    def batch(
        self, numbers: Numbers, epochs: np.ndarray | None = None, seed: int = 0
    ) -> Arrays: ...


def split(
    documents: int, *, validation: float, test: float, seed: int = 0
) -> dict[str, np.ndarray]:
    """The numbers of the documents in each split.

    A document's place follows from its number and the seed alone, so that documents added at the
    end leave the others where they are, and a larger share of validation takes from training only.
    """
    numbers = np.arange(documents, dtype=np.uint64)
    if seed:
        numbers += mix(np.array([seed]))  # far away: the next number would be the next document's
    uniform = (mix(numbers) >> np.uint64(11)) / 2.0**53  # from 0 to below 1
    is_test = uniform < test
    is_validation = ~is_test & (uniform < test + validation)
    masks = {"train": ~is_test & ~is_validation, "validation": is_validation, "test": is_test}
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}
