"""Look-up tables on the host: their values, the nearest entry, k-means, and deployment in fp16."""

import numpy as np
from jaxtyping import Float, Float16, Shaped, UInt8

ROUNDS = 100  # of k-means, which ends long before


def even(levels: int, zero: bool = False) -> Float[np.ndarray, " levels"]:
    """Values evenly spaced on [-1, 1].

    An even number of them has no zero among them. With `zero` it has: one value more is above it
    than below, each side evenly spaced, as in NF4.
    """
    if levels % 2 or not zero:
        return np.linspace(-1, 1, levels, dtype=np.float32)
    half = levels // 2
    below, above = -np.arange(half - 1, 0, -1) / max(half - 1, 1), np.arange(half + 1) / half
    return np.concatenate([below, above]).astype(np.float32)


def nearest(
    values: Float[np.ndarray, "*shape"], table: Float[np.ndarray, " levels"]
) -> UInt8[np.ndarray, "*shape"]:
    """The index of the entry nearest to each value; of a table in any order."""
    order = np.argsort(table, kind="stable").astype(np.uint8)
    ascending = table[order]
    return order[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, values)]


def kmeans(
    values: Shaped[np.ndarray, "..."], count: int, weights: Shaped[np.ndarray, "..."] | None = None
) -> Float[np.ndarray, " count"]:
    """The centres of k-means in one dimension, ascending, from quantiles as a start.

    Sorted values make a cluster a range, and its mean a difference of two running sums: a round
    takes as long as looking up the borders, where general k-means measures every distance.
    """
    flat = np.asarray(values, np.float64).ravel()
    weight = np.ones_like(flat) if weights is None else np.asarray(weights, np.float64).ravel()
    order = np.argsort(flat, kind="stable")
    flat, weight = flat[order], weight[order]
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    moment = np.concatenate([[0.0], np.cumsum(weight * flat)])
    quantiles = (np.arange(count) + 0.5) / count * mass[-1]
    centres = flat[np.clip(np.searchsorted(mass, quantiles) - 1, 0, len(flat) - 1)]
    for _ in range(ROUNDS):
        borders = np.searchsorted(flat, (centres[1:] + centres[:-1]) / 2, side="right")
        ends = np.concatenate([[0], borders, [len(flat)]])
        masses, moments = np.diff(mass[ends]), np.diff(moment[ends])
        moved = np.where(masses > 0, moments / np.maximum(masses, 1e-300), centres)
        if (moved == centres).all():
            break
        centres = moved
    return np.sort(centres).astype(np.float32)


def snapped(table: Float[np.ndarray, " levels"]) -> Float16[np.ndarray, " levels"]:
    """A table as fp16 has it, ascending: entries that fp16 cannot tell apart move to the next.

    A device that looks up by value would else never choose one of them.
    """
    half = np.sort(table).astype(np.float16)
    for i in range(1, len(half)):
        if half[i] <= half[i - 1]:
            half[i] = np.nextafter(half[i - 1], np.float16(np.inf))
    return half
