"""Efficiency of chips: the share of peak FLOP/s and bandwidth that work of a shape reaches."""

import dataclasses
import math
from typing import NamedTuple

from windlass.analysis.fusion import Amount
from windlass.analysis.work import AttentionCall, Matmul
from windlass.devices.chips import Chip
from windlass.errors import UserError


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The efficiency of a chip, as shares of the peaks in the catalogue."""

    matmuls: Amount  # of the peak, by matmuls of the best shape
    memory: Amount  # of the bandwidth, by whatever reads and writes in order
    links: Amount  # of their bandwidth, by collectives
    overlap: Amount  # of the time of matmuls, behind which all-gathers can be hidden
    start: Amount  # seconds from the launch of a kernel to its full speed
    loop_round: Amount  # seconds that a round of a loop takes besides its matmuls and its traffic
    loop_source: str  # of that latency
    vector: Amount  # operations a second of vector units
    attention: "Flash"
    kernels: Amount = 1.0  # of what others reach, by kernels of layers as they read and write
    units: int | None = None  # of a GPU, that each compute a tile of a matmul
    error: Amount = 0.25  # the share by which a step may take longer or shorter
    source: str = ""  # of these numbers


@dataclasses.dataclass(frozen=True)
class Flash:
    """The efficiency of flash attention: of the peak, or by its work besides matmuls."""

    forward: Amount  # of the peak, on long sequences, with heads as wide as the matrix units
    backward: Amount
    narrow: Amount  # of that, with heads half as wide
    ramp: int = 0  # sequence length at which it is at half its speed
    # Of vector units for each pair of positions, where those come on top of the matmuls.
    operations: tuple[int, int] = (0, 0)


# Of an H200, measured: matmuls by the best that cuBLAS sustains (the MAMF table of the book "ML
# engineering", 794 of 989 TFLOP/s), a copy of 1 GB at 3.6 to 4.0 TB/s, and the
# kernels of layers with LoRA together at 2.8 (benchmarks/RESULTS.md). The
# rounds of a loop by GRUs of 64 to 1024 units in batches of 8 to 64: 6 to 9 µs a round forward, 21
# to 33 with the gradient, in which there are three matmuls; the rest starts other kernels.
_GPU = Efficiency(
    matmuls=0.80,
    memory=0.83,
    links=0.8,
    overlap=0.9,
    start=3e-6,
    loop_round=5e-6,
    loop_source="GRUs measured on an H200",
    vector=30e12,
    # cuDNN's flash attention of 1k to 8k positions in rows of one document.
    attention=Flash(forward=0.485, backward=0.355, narrow=0.8, ramp=380),
    kernels=0.71,
    units=132,
    source="measured on an H200, a GPU of another kind",
)
# Matmuls by 827 of 918 TFLOP/s for 8192 rows and columns on a v6e and a copy there at 1.36 of 1.64
# TB/s (Google's microbenchmarks); the time to start by what 1024 rows and columns cost an Ironwood.
# Splash attention by axlearn's benchmark on a v5p (40 heads of 128, rows of 8192, windows of 4096:
# 3.2 ms forward, 12 ms backward), as matmuls, seven instead of five backwards, and what vector
# units do for each score. No speed of a whole training step is in any of these. Nor was a loop
# measured: a TPU runs its rounds by itself, and 1 µs is what a few small operations take it.
_TPU = Efficiency(
    matmuls=0.90,
    memory=0.83,
    links=0.8,
    overlap=0.9,
    start=2e-6,
    loop_round=1e-6,
    loop_source="assumed: no loop was measured on a TPU",
    vector=7.2e12,
    attention=Flash(forward=0.9, backward=0.9 * 5 / 7, narrow=0.5, operations=(5, 23)),
    source="Google's and Apple's microbenchmarks of TPUs",
)
# Vector units have 1024 lanes of 4 operations at the chip's clock, which follows from its peak.
_CHIPS = {
    "TPU v2": {"vector": 2.9e12},
    "TPU v3": {"vector": 3.9e12},
    "TPU v4": {"vector": 8.6e12},
    "TPU v5e": {"vector": 6.1e12},
    "TPU v5p": {"vector": 14.3e12},
    "TPU 7x": {"matmuls": 0.83},
    "H200": {"error": 0.15, "source": "measured on an H200"},
    "H100": {"error": 0.2, "source": "measured on an H200"},
    "A100 40GB": {"matmuls": 0.87, "units": 108},
    "A100 80GB": {"matmuls": 0.87, "units": 108},
    "B200": {"matmuls": 0.78, "units": 148},
    "GB200": {"matmuls": 0.73, "units": 152},
    "T4": {"units": 40},
    "V100 16GB": {"units": 80},
    "V100 32GB": {"units": 80},
    "L4": {"units": 58},
    "RTX 4060": {"units": 24},
    "RTX 4090": {"units": 128},
    "RTX 5090": {"units": 170},
    "RTX PRO 6000": {"units": 188},
}


class Rates(NamedTuple):
    """Peak rates of a device, and its efficiency."""

    peak: dict[str, Amount]
    bandwidth: Amount
    tile: int | None
    efficiency: Efficiency


def find(chip: Chip) -> Efficiency:
    """Efficiency table of a chip."""
    known = _CHIPS.get(chip.name, {})
    if chip.kind == "tpu":
        return dataclasses.replace(_TPU, **known)
    # A multiplication and a sum count twice in the peak of a GPU, and here once.
    vector = chip.peak.get("float32", 2 * _GPU.vector) / 2
    return dataclasses.replace(_GPU, vector=vector, **known)


def rates(chip: Chip) -> Rates:
    """The rates of a chip; refused where the catalogue has no peak."""
    if chip.bandwidth is None or not chip.peak:
        raise UserError(f"no speed estimate for {chip.name}s: their peak is not in the catalogue")
    efficiency = find(chip)
    return Rates(chip.peak, chip.bandwidth, chip.tile, efficiency)


def matmul_seconds(matmul: Matmul, rates: Rates) -> Amount:
    """The time of a matmul, compute-bound or memory-bound."""
    efficiency, shape = rates.efficiency, (matmul.m, matmul.n, matmul.k)
    if efficiency.units is not None:
        share = _by_waves(*shape, matmul.batch, efficiency.units)
    else:
        share = _by_padding(*shape, rates.tile or 128)
    peak = _peak(rates, matmul.dtype)
    if matmul.dtype == "float32" and matmul.is_rounded and efficiency.units is not None:
        peak = max(peak, _rounded(rates))
    compute = matmul.flops / (peak * efficiency.matmuls * share)
    return max(compute, memory_seconds(matmul.moved, rates)) + efficiency.start


def attention_seconds(call: AttentionCall, rates: Rates) -> Amount:
    """The time of a flash attention call."""
    flash, full = rates.efficiency.attention, rates.tile or 128
    share = flash.backward if call.is_backward else flash.forward
    # Heads narrower than the matrix units leave a part of them idle.
    share *= 1.0 if call.dim >= full else flash.narrow ** math.log2(full / call.dim)
    span = min(call.slots, call.pattern.window or call.slots)
    share *= span / (span + flash.ramp)
    matmuls = call.flops / (_peak(rates, call.dtype) * share)
    others = call.pairs * flash.operations[call.is_backward] / rates.efficiency.vector
    floor = memory_seconds(call.moved, rates)
    return max(matmuls + others, floor) + rates.efficiency.start


def memory_seconds(moved: Amount, rates: Rates) -> Amount:
    """Time of memory traffic."""
    return moved / (rates.bandwidth * rates.efficiency.memory)


def _peak(rates: Rates, dtype: str) -> Amount:
    """FLOP/s in a number format; one without units of its own goes through those of another."""
    if dtype in rates.peak:
        return rates.peak[dtype]
    if dtype == "float32" and "bfloat16" in rates.peak:
        return rates.peak["bfloat16"] / 6  # matmuls of bfloat16 that make up one of float32
    return max(rates.peak.values())


def _rounded(rates: Rates) -> Amount:
    """FLOP/s of float32 factors that are rounded to 19 bits: half as many as of 16 bits.

    Units that have bfloat16 have these, too.
    """
    return rates.peak.get("bfloat16", 0.0) / 2


# Tiles of a result that a unit of a GPU computes at once, what it reaches with each, and the length
# of the axis that is summed over after which it is at half of that.
_TILES = (
    ((128, 256), 1.0, 192),
    ((256, 128), 1.0, 192),
    ((128, 128), 0.9, 192),
    ((64, 128), 0.7, 192),
    ((64, 64), 0.5, 192),
    ((32, 32), 0.25, 48),
    ((16, 16), 0.12, 24),
)
_SPLITS = (1, 2, 4, 8, 16)  # of the axis that is summed over, among units


def _by_waves(m: int, n: int, k: int, batch: int, units: int) -> Amount:
    """Utilization of a GPU's units by the best tiles for a shape, after wave quantization."""
    best = 0.0
    for (rows, columns), speed, depth in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        full = batch * m * n / (tiles * rows * columns)
        for split in _SPLITS:
            waves = math.ceil(tiles * split / units)
            even = tiles * split / (waves * units)
            deep = k / (k + split * depth)
            best = max(best, speed * full * even * deep)
    return best


def _by_padding(m: int, n: int, k: int, tile: int) -> Amount:
    """Utilization of a TPU's matrix units by a shape that is padded to their tiles.

    They hold a tile of one factor, through which rows of the other stream eight at a time.
    """
    utilization = max(_filled(n, tile) * _filled(m, 8), _filled(m, tile) * _filled(n, 8))
    return _filled(k, tile) * utilization


def _filled(size: int, tile: int) -> Amount:
    return size / (math.ceil(size / tile) * tile)
