"""Which documents are trained on and which are held out."""

import numpy as np

from windlass.data.shuffle import mix

SPLITS = ("train", "validation", "test")


def split(documents: int, *, validation: float, test: float) -> dict[str, np.ndarray]:
    """The numbers of the documents in each split.

    A document's place follows from its number alone, so that documents added at the end leave the
    others where they are, and a larger share of validation takes from training only.
    """
    drawn = (mix(np.arange(documents)) >> np.uint64(11)) / 2.0**53  # from 0 to below 1
    is_test = drawn < test
    is_validation = ~is_test & (drawn < test + validation)
    chosen = {"train": ~is_test & ~is_validation, "validation": is_validation, "test": is_test}
    return {name: np.flatnonzero(mask) for name, mask in chosen.items()}
