"""TPU slices: names, topologies, and the zones that have them."""

import difflib
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from windlass.config import listing
from windlass.errors import UserError


class Slice(NamedTuple):
    """A TPU slice: chips of one generation on one interconnect, with their hosts."""

    name: str  # v5e-8
    generation: str  # v5e
    topology: str  # sides of the grid of chips: 2x4
    hosts: int
    device_kind: str  # JAX's name of its devices
    devices: int  # as JAX counts them: two a chip on v2, v3 and 7x
    accelerator_type: str | None  # Cloud TPU's name; None: it is rented through GKE alone
    runtime: str | None  # the version of Cloud TPU's system image
    machine_type: str | None  # of a host; None: GKE has none
    label: str | None  # GKE's name for the generation, on its nodes
    zones: tuple[str, ...]  # open to every project, by Google's page of zones

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(map(int, self.topology.split("x")))

    @property
    def chips(self) -> int:
        return math.prod(self.sides)

    @property
    def rings(self) -> tuple[bool, ...]:
        """Wraparound of each side: True where its last chip is linked to its first."""
        whole = _BY_GENERATION[self.generation].ring
        if len(self.sides) == 3:
            return (all(side % whole == 0 for side in self.sides),) * 3
        return tuple(side == whole for side in self.sides)

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(region_of(zone) for zone in self.zones))


class Slices(NamedTuple):
    """One slice, or several of the same size joined by the network of the data centre."""

    each: Slice
    count: int = 1

    @property
    def name(self) -> str:
        return self.each.name if self.count == 1 else f"{self.count}x{self.each.name}"

    @property
    def chips(self) -> int:
        return self.count * self.each.chips

    @property
    def hosts(self) -> int:
        return self.count * self.each.hosts

    @property
    def devices(self) -> int:
        return self.count * self.each.devices


def find(name: str) -> Slices:
    """The slices of a name: `v6e-8`, `v5litepod-8`, `tpu7x-8`, or `2xv6e-16` for two of them."""
    spelled = re.fullmatch(r"(?:(\d+)x)?(?:tpu-?)?(?=v|7)([a-z0-9]+)-(\d+)", name.strip().lower())
    if spelled is None:
        raise UserError(f'"{name}" is no TPU slice; {_near(name)}')
    count, generation, size = spelled.groups()
    generation = {"v5litepod": "v5e", "v7x": "7x"}.get(generation, generation)
    if count is not None and int(count) < 1:
        raise UserError(f'"{name}" is no TPU slice; the number of slices is 1 or more')
    match = _BY_NAME.get(f"{generation}-{size}")
    if match is not None:
        return Slices(match, int(count or 1))
    sizes = [one.name for one in _BY_NAME.values() if one.generation == generation]
    if not sizes:
        raise UserError(f'there is no TPU slice "{name}"; {_near(f"{generation}-{size}")}')
    below = [one for one in sizes if _size(one) < int(size)][-1:]
    above = [one for one in sizes if _size(one) > int(size)][:1]
    nearest = f"the nearest {'are' if below and above else 'is'} {listing([*below, *above], 'and')}"
    counts = "TensorCores, two a chip" if _BY_GENERATION[generation].cores == 2 else "chips"
    raise UserError(
        f'there is no TPU slice "{name}"; {nearest}. The number counts {counts}, and {generation} '
        f"comes as {listing(sizes, 'and')}"
    )


def every() -> list[Slice]:
    """All slices there are, smaller ones of a generation first."""
    return list(_BY_NAME.values())


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def _size(name: str) -> int:
    return int(name.rpartition("-")[2])


def _near(name: str) -> str:
    """The nearest name of a slice, and those there are."""
    meant = difflib.get_close_matches(name.lower(), _BY_NAME, n=3)
    hint = f"did you mean {listing(meant)}? " if meant else ""
    return f"{hint}the generations are {listing(_BY_GENERATION, 'and')}, as in v6e-8 or 2xv6e-16"


class _Generation(NamedTuple):
    """A generation of TPUs: what its slices have in common."""

    name: str
    topologies: str  # those that a size stands for
    cores: int  # that a chip counts for in a slice's name
    devices: int  # that JAX sees of a chip
    device_kind: str
    runtime: str | None
    machine: str | None  # `{}` is the number of chips
    label: str | None
    zones: str
    ring: int = 16  # chips of a side that closes: a pod's in the plane, in space all of a cube's
    pod_zones: str | None = None  # of slices beyond one host, where they are others
    single_host: tuple[int, ...] = (4,)  # chips of the slices that are a single host
    prefix: str | None = None  # of Cloud TPU's accelerator types, where it is another
    on_cloud_tpu: bool = True


_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = (
    "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16"  # each twice the last
)
# Sizes, names and machine types by Google's pages on each generation and by xpk's table, zones by
# Google's page of zones, without those for a single tenant. On v4 and v5p JAX sees a chip's two
# cores as one device.
_GENERATIONS = (
    _Generation(
        "v2", "2x2 4x4 8x8 8x16 16x16", 2, 2, "TPU v2", "tpu-ubuntu2204-base", None, None,
        zones="us-central1-b us-central1-c", pod_zones="us-central1-a",
    ),
    _Generation(
        "v3", "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32", 2, 2, "TPU v3", "tpu-ubuntu2204-base",
        "ct3-hightpu-{}t", "tpu-v3-device",
        zones="us-central1-a us-central1-b europe-west4-a", ring=32, pod_zones="europe-west4-a",
    ),
    _Generation(
        "v4", _CUBES, 2, 1, "TPU v4", "tpu-ubuntu2204-base",
        "ct4p-hightpu-{}t", "tpu-v4-podslice", zones="us-central2-b", ring=4,
    ),
    _Generation(
        "v5e", _FLAT, 1, 1, "TPU v5 lite", "v2-alpha-tpuv5-lite",
        "ct5lp-hightpu-{}t", "tpu-v5-lite-podslice",
        zones="us-central1-a us-south1-a us-west1-c us-west4-a europe-west4-b",
        single_host=(1, 4, 8), prefix="v5litepod",
    ),
    _Generation(
        "v5p", f"{_CUBES} 16x16x24", 2, 1, "TPU v5", "v2-alpha-tpuv5",
        "ct5p-hightpu-{}t", "tpu-v5p-slice", zones="us-central1-a us-east5-a europe-west4-b",
        ring=4,
    ),
    _Generation(
        "v6e", _FLAT, 1, 1, "TPU v6 lite", "v2-alpha-tpuv6e",
        "ct6e-standard-{}t", "tpu-v6e-slice",
        zones="us-central1-b us-east1-d us-east5-a us-east5-b europe-west4-a asia-northeast1-b",
        single_host=(1, 4, 8),
    ),
    _Generation(
        "7x", f"1x1x1 {_CUBES}", 2, 2, "TPU7x", None,
        "tpu7x-standard-{}t", "tpu7x", zones="us-central1-c", ring=4, single_host=(1, 4),
        on_cloud_tpu=False,
    ),
)  # fmt: skip
_BY_GENERATION = {one.name: one for one in _GENERATIONS}


def _slices(of: _Generation) -> Iterator[Slice]:
    for topology in of.topologies.split():
        chips = math.prod(map(int, topology.split("x")))
        hosts = 1 if chips in of.single_host else chips // 4
        size = chips * of.cores
        machine = None if of.name == "v3" and hosts > 1 else of.machine
        zones = of.zones if hosts == 1 else of.pod_zones or of.zones
        yield Slice(
            name=f"{of.name}-{size}",
            generation=of.name,
            topology=topology,
            hosts=hosts,
            device_kind=of.device_kind,
            devices=chips * of.devices,
            accelerator_type=f"{of.prefix or of.name}-{size}" if of.on_cloud_tpu else None,
            runtime=of.runtime,
            machine_type=machine and machine.format(chips // hosts),
            label=machine and of.label,
            zones=tuple(zones.split()),
        )


_BY_NAME = {one.name: one for of in _GENERATIONS for one in _slices(of)}
