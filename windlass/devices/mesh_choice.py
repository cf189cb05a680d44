"""Mesh selection where a recipe leaves sizes open, and the reason in words."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from windlass.devices import mesh as meshes
from windlass.devices.mesh import Mesh
from windlass.units import gib

ROOM = {"tpu": 0.9, "gpu": 0.95}  # the share of usable memory that an estimate may fill

UNKNOWN = "sharded, as the memory of such devices is not in the catalogue"

Split = dict[str, int]


class Rows(NamedTuple):
    """Microbatch size: one of the two is set, or both of a run that resumes."""

    whole: int | None  # over all devices
    each: int | None  # on each device, at most

    def on_each(self, groups: int) -> int:
        """Per-device batch size, where `groups` of devices have rows of their own."""
        return self.each or max(1, (self.whole or groups) // groups)


class Footprint(NamedTuple):
    """An estimate of a run's memory on a chip, in bytes, by the mesh axes that divide it."""

    state: int  # weights, optimiser and gradient: by fsdp and tensor
    experts: int  # the part of `state` that experts have: by expert as well
    vocabulary: int  # embedding and head, all-gathered for use: by tensor
    layer: int  # the weights of a layer, all-gathered for use: by tensor; none without fsdp
    layer_experts: int  # the part of `layer` that experts have: by expert as well
    row: int  # residuals of a row for the backward pass: by tensor
    row_logits: int  # the logits of a row: by tensor
    tile: int  # the logits of a tile, all that are live at once: by tensor
    is_frozen: bool  # most weights are not trained
    memory: int  # of a device
    room: float  # the part of it that may be filled

    def stored(self, split: Mapping[str, int]) -> float:
        """Weights and optimiser on a device."""
        whole = self.state - self.experts * (1 - 1 / split.get("expert", 1))
        return whole / (split["fsdp"] * split["tensor"])

    def needs(self, split: Mapping[str, int], rows: Rows) -> float:
        """Peak memory of a device, estimated."""
        each = rows.on_each(meshes.row_groups(split))
        layer = self.layer - self.layer_experts * (1 - 1 / split.get("expert", 1))
        whole = self.vocabulary + (layer if split["fsdp"] > 1 else 0)
        whole += each * self.row + min(each * self.row_logits, self.tile)
        return self.stored(split) + whole / split["tensor"]

    def holds(self, split: Mapping[str, int], rows: Rows) -> bool:
        return self.needs(split, rows) <= self.room


class MeshChoice(NamedTuple):
    """A chosen mesh shape, and the reason for it."""

    split: Split
    why: str | None  # None: nothing was chosen
    lacks: float | None = None  # bytes that a device would need, where it has fewer


def choose(
    mesh: Mesh,
    devices: int,
    *,
    rows: Rows,
    sizes: Mapping[str, int],
    footprint: Footprint | None,  # None: the memory of the devices is not known
    slices: int = 1,
) -> MeshChoice:
    """The mesh sizes that a recipe sets, and the best for what it leaves open.

    Matrices are computed in pieces only where there are fewer rows than devices, or where nothing
    else fits: a small model would wait for its pieces. Weights that are trained are stored in
    pieces, which costs no more traffic than summing the gradients of whole ones; those that are
    frozen are copied if they fit, as then there is nothing to gather. `problems` says where the
    sizes do not fit the devices.
    """
    able = possible(mesh, devices, rows, sizes) if meshes.is_open(mesh) else []
    if not able or devices == 1:
        return MeshChoice(meshes.shape(mesh, devices), None)
    few = min(split["tensor"] for split in able)
    if footprint is None:
        split = _best([split for split in able if split["tensor"] == few], slices)
        return MeshChoice(split, _why(mesh, split, rows, slices, UNKNOWN))
    fitting = [split for split in able if footprint.holds(split, rows)]
    pieces = min((split["tensor"] for split in fitting), default=few)
    among = [split for split in fitting or able if split["tensor"] == pieces]
    if not fitting:
        split = _best(among, 1)
    else:
        whole = [split for split in among if split["fsdp"] == 1 and footprint.is_frozen]
        split = _best(whole or among, slices)
    why = _why(mesh, split, rows, slices, _memory(footprint, split))
    needs = footprint.needs(split, rows)
    return MeshChoice(split, why, None if needs <= footprint.memory else needs)


def possible(mesh: Mesh, devices: int, rows: Rows, sizes: Mapping[str, int]) -> list[Split]:
    """The splits of all devices that the recipe allows, of those that fit the rows if any do."""

    def ways(name: str) -> list[int]:
        size = getattr(mesh, name)
        return meshes.divisors(devices) if size is None else [size]

    def fits(split: Split) -> bool:
        # More rows than devices that do not go round are better counted anew than torn.
        most = devices if rows.whole is None else rows.whole
        groups = meshes.row_groups(split)
        return most % groups == 0 or (most > devices and split["tensor"] == 1)

    expert = meshes.axis_size(mesh, "expert")
    splits: list[Split] = [
        {name: split[name] for name in meshes.axes(split)}
        for data in ways("data")
        for fsdp in ways("fsdp")
        for tensor in ways("tensor")
        for split in [dict(data=data, fsdp=fsdp, expert=expert, tensor=tensor)]
        if math.prod(split.values()) == devices
        and (mesh.tensor is not None or tensor == 1 or meshes.divides(tensor, sizes))
    ]
    whole = [split for split in splits if split["tensor"] == 1 or mesh.tensor is not None]
    return [split for split in splits if fits(split)] or whole


def _best(able: list[Split], slices: int) -> Split:
    """Data over the slices and weights in pieces in each; else as many pieces as can be."""
    within = [split for split in able if split["data"] % slices == 0]
    return min(within or able, key=lambda split: split["data"])


def _memory(footprint: Footprint, split: Split) -> str:
    has, stored = gib(footprint.memory), gib(footprint.stored(split))
    text = f"weights and optimiser take {stored} of {has} GiB"
    if split["fsdp"] == 1:
        return f"most weights are frozen; {text}" if footprint.is_frozen else text
    whole = gib(footprint.stored(split | {"fsdp": 1}))
    return f"{text}, unsharded they would take {whole}"


def _why(mesh: Mesh, split: Split, rows: Rows, slices: int, memory: str) -> str:
    reasons = []
    if mesh.tensor is None and split["tensor"] > 1:
        devices = math.prod(split.values())
        few = rows.whole is not None and rows.whole < devices
        some = "1 row" if rows.whole == 1 else f"{rows.whole} rows"
        reasons.append(f"{some} for {devices} devices" if few else "less does not fit")
    reasons.append(memory)
    if slices > 1:
        over = "data" if split["data"] % slices == 0 else "fsdp"
        over = over if math.gcd(split["data"], slices) in (1, slices) else "data and fsdp"
        reasons.append(f"{over} over the network between {slices} slices")
    return "; ".join(reasons)
