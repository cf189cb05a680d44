"""How much of what its maker promises a chip gives, by the shape of the work."""

import dataclasses
import math
import os
from typing import NamedTuple

from windlass.devices.chips import Chip
from windlass.errors import UserError
from windlass.planning.fusion import Amount
from windlass.planning.work import Attention, Product


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What a chip reaches of its peaks: shares are of the numbers in the catalogue."""

    products: Amount  # of the peak, by matrix products of the best shape
    memory: Amount  # of the bandwidth, by whatever reads and writes in order
    forward: Amount  # of the peak, by flash attention on long rows with heads of 128
    backward: Amount
    links: Amount  # of their bandwidth, by collectives
    overlap: Amount  # of the time of products, in which other devices' parts can be on their way
    start: Amount  # seconds from the start of a kernel to its full speed
    random: Amount  # numbers of 32 random bits a second
    ramp: int  # positions of a row with which attention is at half its speed
    units: int | None = None  # of a GPU, that each compute a tile of a product
    error: Amount = 0.25  # by which a step may take longer or shorter
    source: str = ""


HOPPER = Efficiency(
    products=0.80,
    memory=0.83,
    forward=0.50,
    backward=0.40,
    links=0.8,
    overlap=0.9,
    start=3e-6,
    random=0.35e12,
    ramp=256,
    units=132,
    error=0.15,
    source="",
)
TPU = Efficiency(
    products=0.90,
    memory=0.83,
    forward=0.50,
    backward=0.45,
    links=0.8,
    overlap=0.9,
    start=2e-6,
    random=0.1e12,
    ramp=256,
    error=0.25,
    source="",
)


CPU = dataclasses.replace(TPU, products=1.0, memory=1.0, overlap=0.0, error=1.0)

# A core of a server's CPU in float32, and its share of the memory's bandwidth: of any CPU this says
# no more than which of two recipes is the faster one.
_CORE = {"float32": 25e9, "bfloat16": 8e9, "float16": 8e9}
_CORE_BANDWIDTH = 8e9


class Rates(NamedTuple):
    """What a device does in a second at best, and what share of it work of a shape gets."""

    peak: dict[str, Amount]
    bandwidth: Amount
    tile: int | None
    efficiency: Efficiency


def rates(chip: Chip) -> Rates:
    if chip.kind == "cpu":
        cores = os.cpu_count() or 1
        peak = {dtype: cores * each for dtype, each in _CORE.items()}
        return Rates(peak, cores * _CORE_BANDWIDTH, 8, CPU)
    if chip.bandwidth is None or not chip.peak:
        raise UserError(
            f"how fast a {chip.name} is, is not in the catalogue, so that no time can be planned; "
            "`windlass plan` knows the chips of `--on h100,v5e-8`, and says which when asked for "
            "another"
        )
    found = TPU if chip.kind == "tpu" else HOPPER
    return Rates(chip.peak, chip.bandwidth, chip.tile, found)


def product_seconds(product: Product, rates: Rates) -> Amount:
    """One matrix product: what the matrix units take for it, or memory if that is longer."""
    efficiency, shape = rates.efficiency, (product.m, product.n, product.k)
    if efficiency.units is not None:
        share = _by_waves(*shape, product.batch, efficiency.units)
    else:
        share = _by_padding(*shape, rates.tile or 128)
    compute = product.flops / (_peak(rates, product.dtype) * efficiency.products * share)
    return max(compute, memory_seconds(product.moved, rates)) + efficiency.start


def attention_seconds(call: Attention, rates: Rates) -> Amount:
    """One call of a flash kernel."""
    efficiency = rates.efficiency
    best = efficiency.backward if call.is_backward else efficiency.forward
    # Heads narrower than the matrix units leave a part of them idle.
    wide = min(1.0, call.dim / 128)
    seen = min(call.length, call.window or call.length)
    share = best * wide * seen / (seen + efficiency.ramp)
    compute = call.flops / (_peak(rates, call.dtype) * share)
    return max(compute, memory_seconds(call.moved, rates)) + efficiency.start


def memory_seconds(moved: Amount, rates: Rates) -> Amount:
    """To read and write so many bytes in order."""
    return moved / (rates.bandwidth * rates.efficiency.memory)


def _peak(rates: Rates, dtype: str) -> Amount:
    """FLOP/s in a number format; one without units of its own goes through those of another."""
    if dtype in rates.peak:
        return rates.peak[dtype]
    if dtype == "float32" and "bfloat16" in rates.peak:
        return rates.peak["bfloat16"] / 6  # products of bfloat16 that make up one of float32
    return max(rates.peak.values())


# Tiles of a result that a unit of a GPU computes at once, and what it reaches with each.
_TILES = (
    ((128, 256), 1.0),
    ((256, 128), 1.0),
    ((128, 128), 0.9),
    ((64, 128), 0.7),
    ((64, 64), 0.5),
)
_SPLITS = (1, 2, 4, 8, 16)  # of the axis that is summed over, among units
_DEPTH = 192  # of that axis, after which a tile is at half its speed


def _by_waves(m: int, n: int, k: int, batch: int, units: int) -> Amount:
    """The share of a GPU's best that the best tiles for a shape reach."""
    best = 0.0
    for (rows, columns), speed in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        full = batch * m * n / (tiles * rows * columns)
        for split in _SPLITS:
            waves = math.ceil(tiles * split / units)
            even = tiles * split / (waves * units)
            deep = k / (k + split * _DEPTH)
            best = max(best, speed * full * even * deep)
    return best


def _by_padding(m: int, n: int, k: int, tile: int) -> Amount:
    """The share of a TPU's best that is left when both axes of its matrix units are filled up."""
    return _filled(m, 8) * _filled(n, tile) * _filled(k, tile)


def _filled(size: int, tile: int) -> Amount:
    return size / (math.ceil(size / tile) * tile)
