"""Codes of a few bits, packed: a stream of bits, in which the lowest bit of a code is the first.

A tensor of packed codes has their width in its name, such as `blocks.0.mlp.up.codes.4bit`.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from windlass.config.reading import Problem, report
from windlass.errors import UserError
from windlass.hub.names import Array
from windlass.hub.shards import WORDS

NAME = re.compile(r"(.+)\.(\d+)bit")
TOGETHER = 1 << 20  # codes that are packed at a time; of 8 the bytes are whole


def name(of: str, bits: int) -> str:
    return f"{of}.{bits}bit"


def size(codes: int, bits: int) -> int:
    """Bytes of so many codes."""
    return -(-codes * bits // 8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Bytes of codes, whatever their shape; one that needs more bits is refused."""
    flat = codes.reshape(-1)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < 1 << bits:
        raise ValueError(f"codes from {flat.min()} to {flat.max()} do not fit in {bits} bits")
    places = np.arange(bits, dtype=np.uint32)
    packed = np.empty(size(flat.size, bits), np.uint8)
    for first in range(0, flat.size, TOGETHER):
        some = flat[first : first + TOGETHER].astype(np.uint32)
        part = np.packbits((some[:, None] >> places & 1).astype(np.uint8), bitorder="little")
        begin = first * bits // 8
        packed[begin : begin + part.size] = part
    return packed


def unpack(packed: np.ndarray, bits: int, codes: int, dtype: Any) -> np.ndarray:
    """The codes of `pack`, flat."""
    flat = np.empty(codes, dtype)
    weights = (1 << np.arange(bits)).astype(np.uint32)
    for first in range(0, codes, TOGETHER):
        some = min(TOGETHER, codes - first)
        begin = first * bits // 8
        part = packed[begin : begin + size(some, bits)]
        split = np.unpackbits(part, count=some * bits, bitorder="little").reshape(some, bits)
        flat[first : first + some] = split @ weights
    return flat


class PackedSlice:
    """Tensor of packed codes in a file, as the codes that they are."""

    def __init__(self, stored: Any, array: Array):
        assert array.bits is not None
        self._stored, self._bits, self.shape = stored, array.bits, array.shape
        self._dtype = np.dtype(array.value.dtype)
        self.type = WORDS[self._dtype.name]

    def __getitem__(self, index: Any) -> np.ndarray:
        codes = unpack(self._stored[:], self._bits, math.prod(self.shape), self._dtype)
        return codes.reshape(self.shape)[index]


def unpacked(stored: dict[str, Any], arrays: Iterable[Array], origin: str) -> dict[str, Any]:
    """Tensors of a file, packed codes as codes; those of another width are refused."""
    expected = {its_name: array for array in arrays for its_name in array.names()}
    found, problems = {}, list[Problem]()
    for its_name, tensor in stored.items():
        match = NAME.fullmatch(its_name)
        array = expected.get(match[1]) if match else None
        if match is None or array is None:
            found[its_name] = tensor
            continue
        width = int(match[2])
        if array.bits != width:
            here = "are none" if array.bits is None else f"have {array.bits}"
            problems.append((match[1], f"has codes of {width} bits; this model's {here}"))
        elif tensor.type != "U8":
            problems.append((match[1], f"is of {tensor.type}; it is of U8 here"))
        elif tensor.shape != (size(math.prod(array.shape), width),):
            there = f"is {list(tensor.shape)} bytes"
            problems.append((match[1], f"{there}; this model's has {list(array.shape)} codes"))
        else:
            found[match[1]] = PackedSlice(tensor, array)
    if problems:
        raise UserError(report(problems, origin))
    return found
