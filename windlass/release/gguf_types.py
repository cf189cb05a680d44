"""GGML types: the one that each tensor of a GGUF file is written in, and its bytes there."""

from typing import Literal, NamedTuple

import numpy as np

from windlass.errors import UserError

Quantization = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4", "tq2_0"]

# The type by the name that a dtype has here.
OF_DTYPE: dict[str, Quantization] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
CODES = (*range(-8, 0), *range(1, 8))  # of Q4_0, but for 0
ROWS = 1024  # of a matrix that are looked at together


class TypeRule(NamedTuple):
    """Types of a file's matrices; whatever has one axis, norms and biases, is F32."""

    maps: str  # of linear maps
    ends: str  # of the embedding and the head


# Embedding and head: as convert_hf_to_gguf writes them in q8_0 and tq2_0; llama-quantize has Q6_K
# beside Q4_0, which the gguf package does not write.
RULES: dict[Quantization, TypeRule] = {
    "f32": TypeRule("F32", "F32"),
    "f16": TypeRule("F16", "F16"),
    "bf16": TypeRule("BF16", "BF16"),
    "q8_0": TypeRule("Q8_0", "Q8_0"),
    "q4_0": TypeRule("Q4_0", "Q8_0"),
    "mxfp4": TypeRule("MXFP4", "Q8_0"),
    "tq2_0": TypeRule("TQ2_0", "F16"),
}
FILE_TYPES = {  # names of gguf.LlamaFileType
    "F32": "ALL_F32",
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
    "MXFP4": "MOSTLY_MXFP4_MOE",
    "TQ2_0": "MOSTLY_TQ2_0",
}


def fitting(kind: str, shape: tuple[int, ...]) -> str:
    """The type, or F16 where a row is no whole number of its blocks."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return "F16" if shape[-1] % block else kind


def size(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, stored = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(np.prod(shape)) // block * stored


def quantized(x: np.ndarray, kind: str, name: str, *, on_grid: bool = False) -> np.ndarray:
    """Bytes of a float32 tensor in a type; numbers `on_grid` are kept bit by bit."""
    from gguf import GGMLQuantizationType, quantize

    with np.errstate(over="ignore"):  # which is looked for
        data = quantize(np.ascontiguousarray(x, np.float32), GGMLQuantizationType[kind])
    if kind != "F32" and not np.isfinite(x).all():
        raise UserError(f"{name} holds numbers that are not finite, which {kind} has none of")
    if kind == "F16" and not np.isfinite(data).all():
        raise UserError(
            f"{name} holds {np.abs(x).max():.3g}, beyond the largest number of F16, 65504; "
            "bf16 and f32 have larger ones"
        )
    if on_grid:
        data = _kept(x, data) if kind == "Q4_0" else data
        if lost := np.count_nonzero(dequantized(data, kind) != x):
            raise UserError(
                f"{name} was to be on the grid of {kind}, as its adapter says, and {lost:,} of its "
                f"{x.size:,} numbers are not; --as merged writes them as they are"
            )
    return data


def dequantized(data: np.ndarray, kind: str) -> np.ndarray:
    """Float32 numbers of a tensor's bytes."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(data, GGMLQuantizationType[kind])


def _kept(x: np.ndarray, data: np.ndarray) -> np.ndarray:
    """The bytes of Q4_0, such that each group of numbers d·q, q in -8..7, has its own d.

    llama.cpp takes d = m / -8 of the number m with the largest magnitude, so that a group whose
    numbers end at 5·d gets another grid. Of d = m / q, for every q, one gives the numbers back.
    """
    data = data.copy()
    for first in range(0, len(x), ROWS):
        part = slice(first, first + ROWS)
        blocks = x[part].reshape(-1, 32).astype(np.float32)
        stored = data[part].reshape(-1, 18)
        lost = np.flatnonzero((dequantized(data[part], "Q4_0").reshape(-1, 32) != blocks).any(-1))
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
        for code in CODES:
            if not lost.size:
                break
            scale = (largest[lost] / np.float32(code)).astype(np.float16)
            step = scale.astype(np.float32)
            codes = np.rint(blocks[lost] / np.where(step, step, 1)).clip(-8, 7)
            good = (codes * step == blocks[lost]).all(-1) & (step != 0).all(-1)
            stored[lost[good]] = _bytes(scale[good], codes[good])
            lost = lost[~good]
        data[part] = stored.reshape(data[part].shape)
    return data


def _bytes(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Blocks of Q4_0: the scale, then two codes a byte, of each half one."""
    low, high = np.split((codes + 8).astype(np.uint8), 2, axis=-1)
    return np.concatenate([scale.view(np.uint8), low | high << 4], axis=-1)
