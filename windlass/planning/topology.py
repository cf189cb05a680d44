"""Interconnect: bandwidth between devices along a mesh axis, on devices that need not be here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from windlass.devices.absent import Absent
from windlass.devices.mesh import ALL, AXES, arranged
from windlass.planning.targets import Target


class Reach(NamedTuple):
    """The interconnect along an axis of a mesh, or along several taken together."""

    ways: int  # devices that links join
    groups: int  # of that many devices each, which only the data-center network joins
    bandwidth: float | None  # bytes/s into a device from those it is linked to; None: unknown
    wraps: bool  # they form rings, which have two directions
    network: float | None  # bytes/s into a device from other groups; None: unknown


def reaches(target: Target, split: Mapping[str, int]) -> "Reaches":
    """The interconnect of a target's devices on a mesh, laid out as a run lays it out."""
    return Reaches(target, arranged(split, target.absent))


class Reaches(NamedTuple):
    """A mesh over the devices of a target."""

    target: Target
    grid: np.ndarray  # of `Absent`

    def along(self, *axes: str) -> Reach:
        """Interconnect along an axis of the mesh, or along several taken together."""
        names = AXES if self.grid.ndim == len(AXES) else ALL
        line = self.grid[tuple(slice(None) if name in axes else 0 for name in names)].ravel()
        chip = self.target.chip
        groups = len({device.slice_index for device in line})
        ways = len(line) // groups
        near = [device for device in line if device.slice_index == line[0].slice_index]
        if self.target.slices is None:
            return Reach(ways, groups, chip.link, False, chip.network)
        bandwidth, wraps = self._links(near)
        return Reach(ways, groups, bandwidth, wraps, chip.network)

    def _links(self, line: Sequence[Absent]) -> tuple[float | None, bool]:
        """Link bandwidth into a device, and whether every axis is a ring."""
        target = self.target
        assert target.slices is not None
        cores = len({device.core_on_chip for device in line})
        shares, rings, box = [], [], cores
        for axis, is_ring in enumerate(target.slices.each.rings):
            places = sorted({device.coords[axis] for device in line})
            if len(places) == 1:
                continue
            # Groups that stand between each other's devices share the links there.
            apart = (places[-1] - places[0]) // (len(places) - 1)
            rings.append(is_ring and len(places) * apart == target.slices.each.sides[axis])
            shares.append((2 if rings[-1] else 1) / apart)
            box *= len(places)
        if not rings:  # the cores of a chip, which meet in its memory
            return target.chip.bandwidth, False
        # What comes for one core of a chip comes for the others that are along the axis too.
        link = target.chip.link
        # Where they fill no box they are a path through it, and have one way to go.
        share = sum(shares) if box == len(line) else min(shares)
        return None if link is None else cores * link * share, all(rings)
