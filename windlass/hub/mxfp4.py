"""MXFP4, the 4-bit floats of GPT-OSS's experts: blocks of 32 codes, and a scale of each.

A number is value(code) · 2^(scale − 127), with 1 sign, 2 exponent and 1 mantissa bits in a code.
Two codes are a byte; tensors are [experts, written, blocks, 16], what is read along the last two.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from windlass.errors import UserError

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
BLOCKS, SCALES = "_blocks", "_scales"
CODES, BIAS = 32, 127  # of a block; of a scale's exponent


class Mxfp4Slice:
    """A tensor of packed blocks and their scales, as the bfloat16 numbers that they are."""

    type = "BF16"

    def __init__(self, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales
        experts, written, count, _ = blocks.shape
        self.shape = (experts, count * CODES, written)

    def __getitem__(self, index: Any) -> np.ndarray:
        every = (slice(None),) * len(self.shape)
        experts, read, written = (*index, *every)[:3] if isinstance(index, tuple) else every
        parts = [one[(experts, written)] for one in (self._blocks, self._scales)]
        return dequantized(*parts).swapaxes(-1, -2)[:, read]


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of packed codes, the low half of a byte first."""
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], CODES)
    numbers = np.ldexp(VALUES[codes], scales[..., None].astype(np.int32) - BIAS)
    return numbers.reshape(*blocks.shape[:-2], -1).astype(ml_dtypes.bfloat16)


def unpacked(stored: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Tensors of a file, those in blocks as the numbers that they are."""
    found = dict(stored)
    for name in [name for name in stored if name.endswith(BLOCKS)]:
        whole = name.removesuffix(BLOCKS)
        blocks, scales = found.pop(name), found.pop(whole + SCALES, None)
        if scales is None or (*scales.shape, CODES // 2) != tuple(blocks.shape):
            has = "is missing" if scales is None else f"is {list(scales.shape)}"
            raise UserError(
                f"{origin}: {name} is {list(blocks.shape)} and {whole}{SCALES} {has}; MXFP4 has "
                f"bytes in blocks of {CODES // 2}, and a scale of each"
            )
        found[whole] = Mxfp4Slice(blocks, scales)
    return found
