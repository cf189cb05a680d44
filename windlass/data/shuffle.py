"""Chance without memory: numbers and permutations that follow from a seed alone."""

import numpy as np

ROUNDS = 8  # even: the two parts of a number, which differ in width, change places in each


def mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64: 64 bits for each number that look drawn at random."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


def permuted(places: np.ndarray, count: int, *, seed: int, epoch: int) -> np.ndarray:
    """What a permutation of 0 to `count` has at some places, without making the rest of it.

    A Feistel network permutes all numbers of so many bits; what falls outside is permuted again
    until it is inside. Grain's own shuffle does the same in blocks of 16 bits and more, which takes
    milliseconds for each row of a small corpus.
    """
    bits = max(4, (count - 1).bit_length())
    low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    masks = [(np.uint64(1) << width) - np.uint64(1) for width in (high, low)]
    key = mix(mix(np.array([seed])) + np.array([epoch], np.uint64))
    keys = mix(key + np.arange(ROUNDS, dtype=np.uint64))

    def once(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> low, numbers & masks[1]
        for number, key in enumerate(keys):
            left, right = right, left ^ mix(right ^ key) & masks[number % 2]
        return left << low | right

    result = once(places.astype(np.uint64))
    while (outside := result >= np.uint64(count)).any():
        result[outside] = once(result[outside])
    return result.astype(np.int64)
