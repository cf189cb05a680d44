"""Clip search on the host: the scale with which rounding to levels costs least.

argmin over s of ‖w − s (c + z)‖²: the best of some clips, then Lloyd's iteration, which never makes
it worse: with its codes fixed, the best scale is s = ⟨w, c + z⟩ / ‖c + z‖².
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from windlass.quantization.levels import Levels

# Shares of the largest weight that are tried: at 4 bits the error has many minima, far apart.
SHARES = np.array([0.02, 0.04, 0.07, *np.linspace(0.1, 1.15, 32)], np.float32)
ROUNDS = 4  # of Lloyd's iteration
SAMPLE = 65536  # weights that are looked at where more share a scale
CHUNK = 2**18  # weights at once, so that they stay in the processor's cache


def best_scales(rows: np.ndarray, levels: Levels, *, signed: bool = False) -> np.ndarray:
    """The best scale of each row of weights [rows, n], in float32.

    With `signed` it may be below 0: levels that reach further down than up are then turned over.
    """
    stride = -(-rows.shape[1] // SAMPLE) | 1  # odd: of a matrix it passes through all columns
    rows = np.ascontiguousarray(rows[:, ::stride], np.float32)
    count = max(1, CHUNK // rows.shape[1])
    parts = [rows[at : at + count] for at in range(0, len(rows), count)]
    with ThreadPoolExecutor() as threads:  # NumPy leaves the interpreter free
        return np.concatenate(
            list(threads.map(partial(_best, levels=levels, signed=signed), parts))
        )


def squared_error(rows: np.ndarray, scales: np.ndarray, levels: Levels) -> np.ndarray:
    """Mean squared error of each row, rounded with its scale."""
    error = _levels(rows, scales, levels)
    error *= scales[:, None]
    np.subtract(rows, error, out=error)
    return np.einsum("rn,rn->r", error, error) / np.float32(rows.shape[1])


def _best(rows: np.ndarray, levels: Levels, signed: bool) -> np.ndarray:
    largest = np.abs(rows).max(1) / np.float32(levels.largest)
    found, least = largest, squared_error(rows, largest, levels)
    for share in np.concatenate([SHARES, -SHARES]) if signed else SHARES:
        found, least = _better(rows, share * largest, found, least, levels)
    for _ in range(ROUNDS):
        level = _levels(rows, found, levels)
        size = np.einsum("rn,rn->r", level, level)
        better = np.einsum("rn,rn->r", rows, level) / np.where(size == 0, 1, size)
        found, least = _better(rows, better, found, least, levels)
    return found


def _better(
    rows: np.ndarray, scales: np.ndarray, found: np.ndarray, least: np.ndarray, levels: Levels
) -> tuple[np.ndarray, np.ndarray]:
    error = squared_error(rows, scales, levels)
    return np.where(error < least, scales, found), np.minimum(error, least)


def _levels(rows: np.ndarray, scales: np.ndarray, levels: Levels) -> np.ndarray:
    step = np.where(scales == 0, 1, scales)[:, None]
    # In place: a fit of a model passes over each of its weights some eighty times.
    codes = rows / step
    codes -= np.float32(levels.offset)
    np.rint(codes, out=codes)
    np.clip(codes, levels.low, levels.high, out=codes)
    codes += np.float32(levels.offset)
    return codes
