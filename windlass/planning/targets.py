"""What a run may be planned for: a TPU slice, some GPUs, or what is here."""

from typing import NamedTuple

from windlass.devices import chips, slices
from windlass.devices.absent import Absent
from windlass.devices.chips import Chip
from windlass.devices.slices import Slices


class Target(NamedTuple):
    """Devices of one kind that a run could have."""

    name: str  # v5e-8, 2xv6e-16, h100, 8xh200
    chip: Chip  # one device, as JAX counts them
    devices: int
    chips: int  # that are rented: on v2, v3 and 7x half as many as devices
    hosts: int
    slices: Slices | None = None  # of TPUs

    @property
    def absent(self) -> list[Absent]:
        """Its devices, in the place of JAX's."""
        count = 1 if self.slices is None else self.slices.count
        each = self.devices // count
        platform, kind = self.chip.kind, self.chip.device_kinds[0]
        return [Absent(platform, kind, i // each) for i in range(self.devices)]


def find(name: str) -> Target:
    found = slices.find(name)
    chip = chips.find(found.each.device_kind)
    assert chip is not None
    return Target(found.name, chip, found.devices, found.chips, found.hosts, found)
