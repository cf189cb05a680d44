"""Which documents are trained on and which are held out."""

import numpy as np

SPLITS = ("train", "validation", "test")


def split(documents: int, *, validation: float, test: float) -> dict[str, np.ndarray]:
    """The numbers of the documents in each split.

    A document's place follows from its number alone, so that documents added at the end leave the
    others where they are, and a larger share of validation takes from training only.
    """
    drawn = _draw(np.arange(documents, dtype=np.uint64))
    is_test = drawn < test
    is_validation = ~is_test & (drawn < test + validation)
    chosen = {"train": ~is_test & ~is_validation, "validation": is_validation, "test": is_test}
    return {name: np.flatnonzero(mask) for name, mask in chosen.items()}


def _draw(numbers: np.ndarray) -> np.ndarray:
    # SplitMix64, then its upper bits as a number from 0 to 1.
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ mixed >> np.uint64(31)) >> np.uint64(11)) / 2.0**53
