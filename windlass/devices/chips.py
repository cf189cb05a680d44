"""What chips can do: the catalogue behind model FLOP utilisation and memory."""

import dataclasses

_GIB = 2**30
_GB = 10**9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a chip, as its maker describes it."""

    name: str
    kind: str
    # Dense FLOP/s of the matrix units, without sparsity. A number format that is absent has no
    # units of its own, or none that a public source states.
    peak: dict[str, float]
    memory_bytes: int
    device_kinds: tuple[str, ...]  # what JAX calls it
    widest_head: int = 128  # that its flash attention takes

    @property
    def has_bfloat16(self) -> bool:
        return "bfloat16" in self.peak


def find(device_kind: str) -> Chip | None:
    """The chip that JAX calls by this name, or None where the catalogue has none."""
    return _BY_NAME.get(device_kind)


_Number = int | float


def _tpu(name: str, teraflops: _Number, memory_bytes: _Number, *device_kinds: str) -> Chip:
    return Chip(name, "tpu", {"bfloat16": teraflops * 1e12}, int(memory_bytes), device_kinds)


def _gpu(
    name: str,
    teraflops: _Number,
    gigabytes: _Number,
    *device_kinds: str,
    widest_head: int = 128,
) -> Chip:
    peak = {"bfloat16": teraflops * 1e12}
    return Chip(name, "gpu", peak, int(gigabytes * _GB), device_kinds, widest_head)


# Google's TPU pages. Memory is what the compiler lets a program use where that is known. On v2, v3
# and 7x JAX shows each of a chip's two cores as a device, so these rows are half a chip.
_TPUS = [
    _tpu("TPU v2", 46 / 2, 8 * _GB, "TPU v2"),
    _tpu("TPU v3", 123 / 2, 16 * _GIB, "TPU v3"),
    _tpu("TPU v4", 275, 30.75 * _GIB, "TPU v4"),
    _tpu("TPU v5e", 197, 15.75 * _GIB, "TPU v5 lite", "TPU v5e"),
    _tpu("TPU v5p", 459, 95.74 * _GIB, "TPU v5", "TPU v5p"),
    _tpu("TPU v6e", 918, 31.25 * _GIB, "TPU v6 lite", "TPU v6e"),
    _tpu("TPU 7x", 2307 / 2, 96 * _GIB, "TPU7x"),
]

# NVIDIA's data sheets; memory is nominal. From Hopper on flash attention takes heads of 256.
_GPUS = [
    Chip("T4", "gpu", {"float16": 65e12}, 16 * _GB, ("Tesla T4",)),
    Chip("V100 16GB", "gpu", {"float16": 125e12}, 16 * _GB, ("Tesla V100-SXM2-16GB",)),
    Chip("V100 32GB", "gpu", {"float16": 125e12}, 32 * _GB, ("Tesla V100-SXM2-32GB",)),
    _gpu("L4", 121, 24, "NVIDIA L4"),
    _gpu("A100 40GB", 312, 40, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    _gpu("A100 80GB", 312, 80, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    _gpu("H100", 989, 80, "NVIDIA H100 80GB HBM3", widest_head=256),
    _gpu("H200", 989, 141, "NVIDIA H200", widest_head=256),
    _gpu("B200", 2250, 180, "NVIDIA B200", widest_head=256),
    _gpu("GB200", 2500, 186, "NVIDIA GB200", widest_head=256),
    _gpu("RTX 4060", 30, 8, "NVIDIA GeForce RTX 4060"),
    _gpu("RTX 4090", 165, 24, "NVIDIA GeForce RTX 4090"),
    _gpu("RTX 5090", 209.5, 32, "NVIDIA GeForce RTX 5090"),
]

_BY_NAME = {name: chip for chip in [*_TPUS, *_GPUS] for name in chip.device_kinds}
