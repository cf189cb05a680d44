"""Permutations that follow from a seed alone, without making the whole of them."""

import numpy as np

from windlass.chance import mix

ROUNDS = 8  # even: the two parts of a number, which differ in width, change places in each


def permuted(places: np.ndarray, count: int, *, seed: int, epoch: int) -> np.ndarray:
    """Random permutation of 0 to `count`: its values at some places, without making the rest.

    A Feistel network permutes all numbers of `bits` bits; what falls outside is permuted again
    until it is inside (cycle walking). Grain's own shuffle does the same in blocks of 16 bits and
    more, which takes milliseconds for each row of a small corpus.
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
