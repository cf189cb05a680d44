"""Checkpoints in 4 bits as others write them: NF4 of bitsandbytes, int4 of compressed-tensors.

A matrix W [outputs, inputs] has several tensors there.

    bitsandbytes, of `weight`: codes [n / 2, 1], the first of two in the high half of its byte, in
    row-major order; `absmax`, a scale for each block of consecutive weights; and `quant_state`,
    JSON as bytes. With double quantisation a scale is a code itself: s = m t[c] + offset, with a
    table t of 256 values and one m for each 256 scales.

    compressed-tensors: `weight_packed`, int32 of eight codes, the first in the lowest bits, along
    the inputs; `weight_scale` [outputs, groups]; `weight_zero_point`, packed along the outputs.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from windlass.config.reading import Problem, listing, report, show
from windlass.config.start import FrozenBase
from windlass.errors import UserError
from windlass.quantization.four_bit import MIDDLE, NORMAL_FLOAT

KEY = "quantization_config"  # of config.json
STATE = ".quant_state.bitsandbytes__"
NESTED = ("nested_absmax", "nested_quant_map")
PACKED = ".weight_packed"
IN_WORD = 8  # codes of an int32
BLOCK = 64  # weights with a scale, in NF4 of bitsandbytes


def read(config: Mapping[str, Any]) -> tuple[FrozenBase | None, list[Problem]]:
    """The 4-bit base that a config.json declares, if it does, and what of it cannot be read."""
    about = config.get(KEY)
    if about is None:
        return None, []
    kinds = {"bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed_tensors}
    method = about.get("quant_method") if isinstance(about, dict) else about
    if method not in kinds:
        known = "bitsandbytes NF4 and compressed-tensors int4 are read"
        return None, [(KEY, f"is {show(method)}; {known}")]
    found, problems = kinds[method](about)
    return found, [(f"{KEY}.{key}", what) for key, what in problems]


def _bitsandbytes(about: Mapping[str, Any]) -> tuple[FrozenBase, list[Problem]]:
    needed = {
        "load_in_4bit": (True,),
        "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8", None),
    }
    return FrozenBase(kind="nf4", group=BLOCK, scales="float32"), _others(about, needed)


def _compressed_tensors(about: Mapping[str, Any]) -> tuple[FrozenBase | None, list[Problem]]:
    groups = about.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        has = f"has {len(groups)}" if isinstance(groups, dict) else f"is {show(groups)}"
        return None, [("config_groups", f"{has}; one group of linear maps is read")]
    ((name, group),) = groups.items()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None, [(f"config_groups.{name}", "has no weights; those are what is stored")]
    needed = {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group",),
        "actorder": (None, False, "static", "weight"),
    }
    problems = [(f"config_groups.{name}.weights.{k}", x) for k, x in _others(weights, needed)]
    problems += _others(about, {"format": ("pack-quantized",)})
    if group.get("input_activations") is not None:
        what = "rounds activations; linear maps here read them as they are"
        problems.append((f"config_groups.{name}.input_activations", what))
    size = weights.get("group_size")
    if not isinstance(size, int) or size < IN_WORD or size % IN_WORD:
        what = f"is {show(size)}; groups are of a multiple of {IN_WORD} inputs"
        problems.append((f"config_groups.{name}.weights.group_size", what))
    if problems:
        return None, problems
    zeros = not weights.get("symmetric", True)
    return FrozenBase(kind="int4", group=size, zeros=zeros, scales="float32"), []


def _others(about: Mapping[str, Any], needed: Mapping[str, tuple]) -> list[Problem]:
    """Settings that have another value than those that can be read."""
    return [
        (key, f"is {show(about.get(key))}; {listing(map(show, values))} is read")
        for key, values in needed.items()
        if about.get(key, values[0] if None in values else None) not in values
    ]


@dataclass(frozen=True)
class FourBitTensor:
    """A matrix of a checkpoint that is stored in 4 bits: codes and scales of its groups."""

    kind: str
    codes: "Codes"
    groups: int  # of each output
    scales: Callable[[], np.ndarray]  # reads [outputs, groups], float32
    zeros: Callable[[], np.ndarray] | None = None  # the same of zero points, uint8
    type: str = "F32"  # of the numbers that it stands for

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def in_groups(self, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Scales and zero points of so many groups, of which those that are here are made."""
        scales, zeros = self.scales(), None if self.zeros is None else self.zeros()
        times = count // self.groups
        return np.repeat(scales, times, 1), None if zeros is None else np.repeat(zeros, times, 1)

    def __getitem__(self, index: Any) -> np.ndarray:
        codes, (scales, zeros) = self.codes[:], self.in_groups(self.shape[1])
        if self.kind == "nf4":
            return (np.array(NORMAL_FLOAT, np.float32)[codes] * scales)[index]
        middle = np.float32(MIDDLE) if zeros is None else zeros.astype(np.float32)
        return ((codes.astype(np.float32) - middle) * scales)[index]


@dataclass(frozen=True)
class Codes:
    """Packed codes of a tensor as numbers below 16, one for each weight."""

    stored: Any
    shape: tuple[int, int]
    is_high_first: bool
    type: str = "U8"

    def __getitem__(self, index: Any) -> np.ndarray:
        raw = np.ascontiguousarray(self.stored[:]).view(np.uint8).reshape(-1)
        halves = (raw >> 4, raw & 15) if self.is_high_first else (raw & 15, raw >> 4)
        return np.stack(halves, axis=-1).reshape(self.shape)[index]


def joined(tensors: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Tensors of files, those that together are one matrix as a `FourBitTensor` of its name."""
    found, problems, used = {}, list[Problem](), set[str]()
    for name in tensors:
        read = _matrix_of(name)
        if read is None:
            continue
        matrix, parts, make = read
        held = {part: tensors[full] for part, full in parts.items() if full in tensors}
        used |= {full for full in parts.values() if full in tensors}
        try:
            found[matrix] = make(held)
        except ValueError as wrong:
            problems.append((matrix, str(wrong)))
    if problems:
        raise UserError(report(problems, origin))
    return {name: one for name, one in tensors.items() if name not in used} | found


def _matrix_of(name: str) -> tuple[str, dict[str, str], Any] | None:
    """The matrix whose codes or settings a tensor holds, its parts by name, and their reader."""
    if STATE in name:
        matrix = name.partition(STATE)[0]
        parts = {part: f"{matrix}.{part}" for part in ("absmax", "quant_map", *NESTED)}
        return matrix, parts | {"codes": matrix, "state": name}, _normal_float
    if name.endswith(PACKED):
        module = name.removesuffix(PACKED)
        parts = {part: f"{module}.weight_{part}" for part in ("scale", "zero_point", "shape")}
        others = {"order": f"{module}.weight_g_idx", "codes": name}
        return f"{module}.weight", parts | others, _integers
    return None


def _normal_float(parts: Mapping[str, Any]) -> FourBitTensor:
    """The tensors of bitsandbytes as one."""
    state = _state(parts["state"][:])
    _require(parts, "codes", "absmax", "quant_map")
    table, shape = parts["quant_map"][:].reshape(-1), state.get("shape")
    if state.get("quant_type") != "nf4" or not np.allclose(table, NORMAL_FLOAT, atol=1e-6):
        raise ValueError(f"is of {show(state.get('quant_type'))}; nf4 with its own table is read")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
        raise ValueError(f"has the shape {show(shape)}; a matrix has two sizes")
    size: Any = state.get("blocksize")
    count = math.prod(shape)
    if not _is_size(size) or shape[1] % size:
        raise ValueError(f"has blocks of {show(size)}, which do not divide its {shape[1]} inputs")
    if math.prod(parts["codes"].shape) * 2 != count or parts["codes"].type != "U8":
        raise ValueError(f"is {list(parts['codes'].shape)} bytes; {shape} codes are half as many")
    if math.prod(parts["absmax"].shape) * size != count:
        raise ValueError(f"has {list(parts['absmax'].shape)} scales for {count // size:,} blocks")
    codes = Codes(parts["codes"], (shape[0], shape[1]), is_high_first=True)
    read = _nested(parts, state) if NESTED[0] in parts else partial(_floats, parts["absmax"])
    groups = shape[1] // size
    return FourBitTensor("nf4", codes, groups, lambda: read().reshape(-1, groups))


def _nested(parts: Mapping[str, Any], state: Mapping[str, Any]) -> Callable[[], np.ndarray]:
    """Reader of scales that are codes of 8 bits themselves."""
    _require(parts, *NESTED)
    each: Any = state.get("nested_blocksize")
    offset = state.get("nested_offset")
    outer, table = (math.prod(parts[name].shape) for name in NESTED)
    count, is_coded = math.prod(parts["absmax"].shape), parts["absmax"].type == "U8"
    is_whole = is_coded and table == 256 and _is_size(each) and outer == -(-count // each)
    if not is_whole or not isinstance(offset, float | int):
        raise ValueError("has scales whose own scales are not those of double quantisation")

    def read() -> np.ndarray:
        outer, table = (_floats(parts[name]) for name in NESTED)
        codes = parts["absmax"][:].reshape(-1)
        return table[codes] * np.repeat(outer, each)[:count] + np.float32(offset)

    return read


def _floats(stored: Any) -> np.ndarray:
    return stored[:].reshape(-1).astype(np.float32)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _state(raw: np.ndarray) -> dict[str, Any]:
    try:
        state = json.loads(raw.astype(np.uint8).tobytes())
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise ValueError("has a quant_state that is no JSON")
    return state


def _integers(parts: Mapping[str, Any]) -> FourBitTensor:
    """The tensors of compressed-tensors as one."""
    _require(parts, "scale", "shape")
    if "order" in parts:
        raise ValueError("has weight_g_idx: groups of inputs that do not lie together are not read")
    shape = [int(size) for size in parts["shape"][:].reshape(-1)]
    if len(shape) != 2 or min(shape) < 1 or shape[1] % IN_WORD:
        raise ValueError(f"has the shape {shape}; two sizes are read, the last in eights")
    if parts["codes"].shape != (shape[0], shape[1] // IN_WORD) or parts["codes"].type != "I32":
        raise ValueError(f"is {list(parts['codes'].shape)} words, and {shape} weights")
    rows, groups = (*parts["scale"].shape, 0, 0)[:2]
    if rows != shape[0] or groups < 1 or shape[1] % groups:
        raise ValueError(f"has scales of {list(parts['scale'].shape)} for {shape} weights")
    codes = Codes(parts["codes"], (shape[0], shape[1]), is_high_first=False)
    scales = partial(_floats, parts["scale"])
    zeros = _zeros(parts["zero_point"], rows, groups) if "zero_point" in parts else None
    return FourBitTensor("int4", codes, groups, lambda: scales().reshape(-1, groups), zeros)


def _zeros(stored: Any, rows: int, groups: int) -> Callable[[], np.ndarray]:
    """Reader of zero points [outputs, groups], of which eight outputs share an int32."""
    if stored.type != "I32" or stored.shape != (-(-rows // IN_WORD), groups):
        raise ValueError(f"has zero points of {list(stored.shape)} for scales of {[rows, groups]}")

    def read() -> np.ndarray:
        shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
        each = (stored[:].view(np.uint32)[:, None] >> shifts) & np.uint32(15)
        return each.reshape(-1, groups)[:rows].astype(np.uint8)

    return read


def _require(parts: Mapping[str, Any], *names: str) -> None:
    if missing := [name for name in names if name not in parts]:
        raise ValueError(f"has no {listing(missing, 'and')} beside its codes")
