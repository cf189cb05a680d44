"""Alignment: sizes that a chip pads to its matrix units, and what that costs."""

from collections.abc import Mapping

from windlass.devices.chips import Chip

SLIGHT = 0.01  # of what is computed: for less nobody changes a model
SIDE = 128  # of the matrix units of most TPUs, and of the tiles that arrays are stored in


def warnings(sizes: Mapping[str, int], kind: str, chip: Chip | None) -> list[str]:
    """Warnings, by key, of sizes that a TPU pads by more than a little.

    Not of GPUs, whose matrix units take multiples of 8 to 64 and whose libraries hide most of the
    rest, nor of CPUs.
    """
    if kind != "tpu":
        return []
    name = chip.name if chip else "TPU"
    side = (chip and chip.tile) or SIDE
    return [
        _padding(key, size, side, name)
        for key, size in sizes.items()
        if 1 - size / _padded(size, side) >= SLIGHT
    ]


def _padding(key: str, size: int, side: int, name: str) -> str:
    padded = _padded(size, side)
    # A vocabulary can grow, but not lose tokens.
    nearest = padded if key == "model.vocab" else max(side, round(size / side) * side)
    return (
        f"{key} is {size}, which a {name} pads to {padded}: {1 - size / padded:.1%} of what it "
        f"computes there is padding; {nearest} is the nearest multiple of {side}"
    )


def _padded(size: int, side: int) -> int:
    return -(-size // side) * side
