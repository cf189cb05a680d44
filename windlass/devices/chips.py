"""The catalogue of chips: peak FLOP/s, memory, bandwidth; behind MFU and plans."""

import dataclasses
import os
from collections.abc import Mapping

from windlass.errors import UserError

_GIB = 2**30
_GB = 1e9

# The share of a GPU's memory that JAX takes for itself, and what a user changes it by.
SHARE = 0.75
SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a chip, as its maker describes it; None is what no public source says."""

    name: str
    kind: str
    # Dense FLOP/s of the matrix units, without sparsity. A number format that is absent has no
    # units of its own, or none that a public source states.
    peak: dict[str, float]
    memory_bytes: int  # of a TPU what a program may use, of a GPU what is written on it
    device_kinds: tuple[str, ...]  # JAX's names of it
    widest_head: int = 128  # that its flash attention takes
    bandwidth: float | None = None  # bytes/s of its memory
    link: float | None = None  # bytes/s one way: over one link of a torus; NVLink to all; PCIe
    axes: int = 0  # of the torus; 1: NVLink; 0: PCIe alone
    network: float | None = None  # bytes/s one way to other slices or hosts
    host: float | None = None  # bytes/s to the memory of its host
    tile: int | None = None  # the side of a TPU's matrix units
    reported: int | None = None  # bytes that a GPU's driver reports
    per_host: int = 8  # GPUs of a host
    joined: int = 8  # GPUs that links join

    @property
    def has_bfloat16(self) -> bool:
        return "bfloat16" in self.peak

    @property
    def slug(self) -> str:
        """Its name in an option or a file: `v5e`, `h100`, `a100-40gb`."""
        return self.name.removeprefix("TPU ").lower().replace(" ", "-")


def find(device_kind: str) -> Chip | None:
    """The chip that JAX calls by this name, or None where the catalogue has none."""
    return _BY_NAME.get(device_kind)


def every() -> list[Chip]:
    """All chips of the catalogue, TPUs first, older ones first."""
    return [*_TPUS, *_GPUS]


def usable(chip: Chip, environ: Mapping[str, str] = os.environ) -> int:
    """Usable memory in bytes: of a GPU the share that JAX preallocates."""
    if chip.kind != "gpu":
        return chip.memory_bytes
    return int(share(environ) * (chip.reported or chip.memory_bytes))


def share(environ: Mapping[str, str] = os.environ) -> float:
    """Memory fraction of a GPU that JAX preallocates, by the environment where that sets it."""
    for name in SHARES:
        if text := environ.get(name):
            try:
                return float(text)
            except ValueError:
                raise UserError(f'{name} is "{text}"; it must be a number, as 0.9') from None
    return SHARE


_Number = int | float


def _tpu(
    name: str,
    teraflops: _Number,
    memory_bytes: _Number,
    *device_kinds: str,
    gigabytes: _Number,  # a second, of memory
    link: _Number | None,
    axes: int,
    network: _Number | None = None,
    host: _Number | None = None,
    tile: int = 128,
    devices: int = 1,  # as which JAX shows a chip; numbers are of the whole chip
    **others: _Number,
) -> Chip:
    def each(amount: _Number | None, unit: float = _GB) -> float | None:
        return None if amount is None else amount * unit / devices

    peak = {"bfloat16": teraflops, **others}
    return Chip(
        name,
        "tpu",
        {dtype: amount * 1e12 / devices for dtype, amount in peak.items()},
        int(memory_bytes / devices),
        device_kinds,
        bandwidth=each(gigabytes),
        link=each(link),
        axes=axes,
        network=each(network),
        host=each(host),
        tile=tile,
    )


# Google's TPU pages, and JAX's table for 8t and 8i. Memory is what the compiler lets a program use
# where that is known. On v2, v3, 7x and 8i JAX shows each of a chip's two cores as a device.
# Links are those of the book "How to scale your model", of which v2's and 8t's are not: they follow
# from a chip's whole bandwidth. float32 is six matmuls of bfloat16, and has no units of its own.
_TPUS = [
    _tpu("TPU v2", 46, 16 * _GB, "TPU v2", gigabytes=700, link=62, axes=2, host=16, devices=2),
    _tpu("TPU v3", 123, 32 * _GIB, "TPU v3", gigabytes=900, link=100, axes=2, host=16, devices=2),
    _tpu(
        "TPU v4", 275, 30.75 * _GIB, "TPU v4",
        gigabytes=1228, link=45, axes=3, host=16, int8=275,
    ),
    _tpu(
        "TPU v5e", 197, 15.75 * _GIB, "TPU v5 lite", "TPU v5e",
        gigabytes=819, link=45, axes=2, network=3.125, host=16, int8=394,
    ),
    _tpu(
        "TPU v5p", 459, 95.74 * _GIB, "TPU v5", "TPU v5p",
        gigabytes=2765, link=90, axes=3, network=6.25, host=16, int8=918, float8=459,
    ),
    _tpu(
        "TPU v6e", 918, 31.25 * _GIB, "TPU v6 lite", "TPU v6e",
        gigabytes=1640, link=90, axes=2, network=12.5, host=32, tile=256, int8=1836, float8=918,
    ),
    _tpu(
        "TPU 7x", 2307, 192 * _GIB, "TPU7x",
        gigabytes=7380, link=90, axes=3, network=12.5, tile=256, devices=2, float8=4614,
    ),
    _tpu(
        "TPU 8t", 996, 216 * _GB, "TPU8t",
        gigabytes=6500, link=200, axes=3, tile=256, float8=5977, int4=11954,
    ),
    # Its links are no torus, and how fast each is was not published.
    _tpu(
        "TPU 8i", 1101, 288 * _GB, "TPU8i",
        gigabytes=8600, link=None, axes=0, tile=256, devices=2, float8=8808,
    ),
]  # fmt: skip


def _gpu(
    name: str,
    gigabytes: _Number,
    *device_kinds: str,
    bandwidth: _Number,
    pcie: _Number,
    nvlink: _Number | None = None,  # one way, to all others
    network: _Number | None = None,
    reported: float | None = None,  # GiB
    widest_head: int = 128,
    per_host: int = 8,
    joined: int = 8,
    **peak: _Number,
) -> Chip:
    return Chip(
        name,
        "gpu",
        {dtype: amount * 1e12 for dtype, amount in peak.items()},
        int(gigabytes * _GB),
        device_kinds,
        widest_head,
        bandwidth=bandwidth * _GB,
        link=(nvlink or pcie) * _GB,
        axes=1 if nvlink else 0,
        network=None if network is None else network * _GB,
        host=pcie * _GB,
        reported=None if reported is None else int(reported * _GIB),
        per_host=per_host,
        joined=joined,
    )


# NVIDIA's data sheets: memory is nominal, PCIe one way, the network that of a DGX of such GPUs.
# What the driver reports is the least in public messages of memory running out, and of the
# H200 what was measured. From Hopper on flash attention takes heads of 256. float32 is that of the
# CUDA cores: rounded to 19 bits the matrix units take it too, which no run here does.
_GPUS = [
    _gpu(
        "T4", 16, "Tesla T4",
        bandwidth=320, pcie=16, reported=14.56, float16=65, float32=8.1, int8=130,
    ),
    _gpu(
        "V100 16GB", 16, "Tesla V100-SXM2-16GB",
        bandwidth=900, pcie=16, nvlink=150, float16=125, float32=15.7,
    ),
    _gpu(
        "V100 32GB", 32, "Tesla V100-SXM2-32GB",
        bandwidth=900, pcie=16, nvlink=150, reported=31.73, float16=125, float32=15.7,
    ),
    _gpu(
        "L4", 24, "NVIDIA L4", bandwidth=300, pcie=32, reported=22.03,
        bfloat16=121, float16=121, float32=30.3, float8=242, int8=242,
    ),
    _gpu(
        "A100 40GB", 40, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB",
        bandwidth=1555, pcie=32, nvlink=300, network=25, reported=39.38,
        bfloat16=312, float16=312, float32=19.5, int8=624,
    ),
    _gpu(
        "A100 80GB", 80, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe",
        bandwidth=2039, pcie=32, nvlink=300, network=25, reported=79.14,
        bfloat16=312, float16=312, float32=19.5, int8=624,
    ),
    _gpu(
        "H100", 80, "NVIDIA H100 80GB HBM3",
        bandwidth=3350, pcie=64, nvlink=450, network=50, reported=79.14, widest_head=256,
        bfloat16=989, float16=989, float32=67, float8=1979, int8=1979,
    ),
    _gpu(
        "H200", 141, "NVIDIA H200",
        bandwidth=4800, pcie=64, nvlink=450, network=50, reported=139.80, widest_head=256,
        bfloat16=989, float16=989, float32=67, float8=1979, int8=1979,
    ),
    _gpu(
        "B200", 180, "NVIDIA B200",
        bandwidth=8000, pcie=64, nvlink=900, network=50, reported=178.35, widest_head=256,
        bfloat16=2250, float16=2250, float8=4500,
    ),
    _gpu(
        "GB200", 186, "NVIDIA GB200", bandwidth=8000, pcie=225, nvlink=900, network=50,
        widest_head=256, per_host=4, joined=72, bfloat16=2500, float16=2500, float8=5000,
    ),
    _gpu(
        "RTX 4060", 8, "NVIDIA GeForce RTX 4060", bandwidth=272, pcie=16,
        bfloat16=30, float16=30, float32=15.1, float8=60,
    ),
    _gpu(
        "RTX 4090", 24, "NVIDIA GeForce RTX 4090", bandwidth=1008, pcie=32, reported=23.64,
        bfloat16=165, float16=165, float32=82.6, float8=330,
    ),
    _gpu(
        "RTX 5090", 32, "NVIDIA GeForce RTX 5090", bandwidth=1792, pcie=64, reported=31.36,
        bfloat16=209.5, float16=209.5, float32=104.8, float8=419,
    ),
    _gpu(
        "RTX PRO 6000", 96, "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        bandwidth=1790, pcie=64, reported=94.97, bfloat16=504, float16=504, float8=1000,
    ),
]  # fmt: skip

_BY_NAME = {name: chip for chip in [*_TPUS, *_GPUS] for name in chip.device_kinds}
