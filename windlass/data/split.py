"""Which documents are trained on and which are held out."""

import numpy as np

from windlass.data.shuffle import mix

SPLITS = ("train", "validation", "test")


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
    drawn = (mix(numbers) >> np.uint64(11)) / 2.0**53  # from 0 to below 1
    is_test = drawn < test
    is_validation = ~is_test & (drawn < test + validation)
    chosen = {"train": ~is_test & ~is_validation, "validation": is_validation, "test": is_test}
    return {name: np.flatnonzero(mask) for name, mask in chosen.items()}
