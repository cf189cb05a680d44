"""Counter-based random numbers: each follows from a seed and numbers alone, in any order."""

import numpy as np


def mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64: 64 bits for each number that look drawn at random."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


def keys(seed: int, *numbers: np.ndarray) -> np.ndarray:
    """Hash keys: 64 bits for each row of some counters, such as its epoch and its place."""
    bits = mix(np.full(np.shape(numbers[0]), seed))
    for counter in numbers:
        bits = mix(bits + counter.astype(np.uint64))
    return bits


def uniform(bits: np.ndarray) -> np.ndarray:
    """Numbers from 0 to below 1, of 64 bits each."""
    return (bits >> np.uint64(11)) / 2.0**53


def permutations(keys: np.ndarray, count: int) -> np.ndarray:
    """A permutation of 0 to `count` for each key."""
    return np.argsort(mix(keys[:, None] + np.arange(count, dtype=np.uint64)), axis=1)


def subsets(keys: np.ndarray, count: int, below: int) -> np.ndarray:
    """A random subset for each key, of `count` different numbers from 0 to `below`.

    Floyd's algorithm: every subset is as likely as any other, and none is drawn again.
    """
    drawn_from = uniform(mix(keys[:, None] + np.arange(count, dtype=np.uint64)))
    subset = np.empty((len(keys), count), np.int32)
    for place, last in enumerate(range(below - count, below)):
        drawn = (drawn_from[:, place] * (last + 1)).astype(np.int32)
        is_in = (subset[:, :place] == drawn[:, None]).any(axis=1)
        subset[:, place] = np.where(is_in, last, drawn)
    return subset
