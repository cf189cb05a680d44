"""Checkpoints in 4 bits, written by the definitions of the formats of others."""

import json
from typing import Any

import numpy as np

from windlass.quantization.four_bit import NORMAL_FLOAT

TABLE = np.array(NORMAL_FLOAT, np.float32)
# Of scales: any ascending table will do that has a code for each.
SCALE_TABLE = np.sort(np.random.default_rng(0).uniform(-1, 1, 256)).astype(np.float32)
BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def compressed_tensors(group: int, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
        "actorder": None,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return about | {"config_groups": groups, "ignore": ["lm_head"]}


def normal_float(
    name: str, weight: np.ndarray, size: int = 64, *, nested: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of bitsandbytes for a matrix, and the matrix that they stand for."""
    blocks = weight.astype(np.float32).reshape(-1, size)
    scales = np.abs(blocks).max(1)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "float32"}
    state |= {"shape": list(weight.shape)}
    tensors: dict[str, np.ndarray] = {f"{name}.quant_map": TABLE}
    if nested:
        codes, outer, offset, scales = _doubly(scales)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {f"{name}.absmax": codes, f"{name}.nested_absmax": outer}
        tensors |= {f"{name}.nested_quant_map": SCALE_TABLE}
    else:
        tensors |= {f"{name}.absmax": scales}
    codes = np.abs((blocks / scales[:, None])[..., None] - TABLE).argmin(-1).astype(np.uint8)
    flat = codes.reshape(-1)
    tensors[name] = ((flat[::2] << 4) | flat[1::2]).reshape(-1, 1)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = text
    return tensors, (TABLE[codes] * scales[:, None]).reshape(weight.shape)


def _doubly(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    offset = float(scales.mean(dtype=np.float32))
    parts = np.array_split(scales - np.float32(offset), range(256, len(scales), 256))
    outer = np.array([np.abs(part).max() for part in parts], np.float32)
    spread = np.repeat(outer, 256)[: len(scales)]
    ratio = (scales - np.float32(offset)) / spread
    codes = np.abs(ratio[:, None] - SCALE_TABLE).argmin(1).astype(np.uint8)
    return codes, outer, offset, SCALE_TABLE[codes] * spread + np.float32(offset)


def integers(
    module: str, weight: np.ndarray, size: int, *, symmetric: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of compressed-tensors for a matrix, and the matrix that they stand for."""
    groups = weight.astype(np.float32).reshape(len(weight), -1, size)
    if symmetric:
        scales = np.abs(groups).max(2) / 7.5
        zeros = np.zeros(scales.shape, np.int32)
    else:
        scales = (groups.max(2) - groups.min(2)) / 15
        zeros = np.clip(np.round(-8 - groups.min(2) / scales), -8, 7).astype(np.int32)
    levels = np.round(groups / scales[..., None]) + zeros[..., None]
    levels = np.clip(levels, -8, 7).astype(np.int32)
    found = ((levels - zeros[..., None]) * scales[..., None]).astype(np.float32)
    tensors = {
        f"{module}.weight_packed": _words(levels.reshape(weight.shape)),
        f"{module}.weight_scale": scales.astype(np.float32),
        f"{module}.weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = _words(zeros.T).T.copy()
    return tensors, found.reshape(weight.shape)


def _words(levels: np.ndarray) -> np.ndarray:
    """Levels from -8 to 7 along the last axis, eight in an int32, the first in the lowest bits."""
    padded = np.pad(levels + 8, [(0, 0), (0, -levels.shape[1] % 8)]).astype(np.uint32)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = (padded.reshape(len(levels), -1, 8) << shifts).sum(-1, dtype=np.uint32)
    return words.view(np.int32)
