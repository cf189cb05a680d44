"""The mesh that a run gets where its recipe leaves it open, and the reason in words."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from windlass.devices import mesh as meshes
from windlass.devices.mesh import AXES, Mesh
from windlass.units import gib

ROOM = {"tpu": 0.9, "gpu": 0.95}  # the share of what a program may use that an estimate may fill

UNKNOWN = "in pieces, as the catalogue has not the memory of such devices"

Split = dict[str, int]


class Rows(NamedTuple):
    """The rows of a microbatch: one of the two is said, or both of a run that goes on."""

    whole: int | None  # over all devices
    each: int | None  # on each device, at most

    def on_each(self, groups: int) -> int:
        """The rows on a device, where so many groups of devices have rows of their own."""
        return self.each or max(1, (self.whole or groups) // groups)


class Footprint(NamedTuple):
    """An estimate of a run's memory on a chip, in bytes, by the mesh axes that divide it."""

    state: int  # weights, optimiser and gradient: by fsdp and tensor
    vocabulary: int  # the matrices of words, put together to be used: by tensor
    layer: int  # the weights of a layer, put together to be used: by tensor; none without fsdp
    row: int  # what a row leaves for the backward pass: by tensor
    row_logits: int  # the logits of a row: by tensor
    tile: int  # the logits of a tile, which are all that there are at once: by tensor
    is_frozen: bool  # most weights are not trained
    memory: int  # of a device
    room: float  # of that what may be filled

    def stored(self, split: Mapping[str, int]) -> float:
        """Weights and optimiser on a device."""
        return self.state / (split["fsdp"] * split["tensor"])

    def needs(self, split: Mapping[str, int], rows: Rows) -> float:
        """All that a device holds at once."""
        each = rows.on_each(split["data"] * split["fsdp"])
        whole = self.vocabulary + (self.layer if split["fsdp"] > 1 else 0)
        whole += each * self.row + min(each * self.row_logits, self.tile)
        return self.stored(split) + whole / split["tensor"]

    def holds(self, split: Mapping[str, int], rows: Rows) -> bool:
        return self.needs(split, rows) <= self.room


class Choice(NamedTuple):
    """The sizes of a mesh, and what there is to say about them."""

    split: Split
    why: str | None  # None: nothing was chosen
    lacks: float | None = None  # bytes that a device would need, where it has not so many


def choose(
    mesh: Mesh,
    devices: int,
    *,
    rows: Rows,
    sizes: Mapping[str, int],
    footprint: Footprint | None,  # None: the memory of the devices is not known
    slices: int = 1,
) -> Choice:
    """The sizes that a recipe says, and the best for what it does not say.

    Matrices are computed in pieces only where there are fewer rows than devices, or where nothing
    else fits: a small model would wait for its pieces. Weights that are trained are stored in
    pieces, which costs no more traffic than summing the gradients of whole ones; those that are
    frozen are copied if they fit, as then there is nothing to gather. `problems` says where the
    sizes do not fit the devices.
    """
    able = possible(mesh, devices, rows, sizes) if meshes.is_open(mesh) else []
    if not able or devices == 1:
        return Choice(meshes.shape(mesh, devices), None)
    few = min(split["tensor"] for split in able)
    if footprint is None:
        split = _best([split for split in able if split["tensor"] == few], slices)
        return Choice(split, _why(mesh, split, rows, slices, UNKNOWN))
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
    return Choice(split, why, None if needs <= footprint.memory else needs)


def possible(mesh: Mesh, devices: int, rows: Rows, sizes: Mapping[str, int]) -> list[Split]:
    """The splits of all devices that the recipe allows, of those that fit the rows if any do."""

    def ways(name: str) -> list[int]:
        size = getattr(mesh, name)
        return meshes.divisors(devices) if size is None else [size]

    def fits(split: Split) -> bool:
        # More rows than devices that do not go round are better counted anew than torn.
        most = devices if rows.whole is None else rows.whole
        groups = split["data"] * split["fsdp"]
        return most % groups == 0 or (most > devices and split["tensor"] == 1)

    found: list[Split] = [
        dict(zip(AXES, (data, fsdp, tensor), strict=True))
        for data in ways("data")
        for fsdp in ways("fsdp")
        for tensor in ways("tensor")
        if data * fsdp * tensor == devices
        and (mesh.tensor is not None or tensor == 1 or meshes.divides(tensor, sizes))
    ]
    whole = [split for split in found if split["tensor"] == 1 or mesh.tensor is not None]
    return [split for split in found if fits(split)] or whole


def _best(able: list[Split], slices: int) -> Split:
    """Data over the slices and weights in pieces in each; else as many pieces as can be."""
    within = [split for split in able if split["data"] % slices == 0]
    return min(within or able, key=lambda split: split["data"])


def _memory(footprint: Footprint, split: Split) -> str:
    has, stored = gib(footprint.memory), gib(footprint.stored(split))
    said = f"weights and optimiser take {stored} of {has} GiB"
    if split["fsdp"] == 1:
        return f"most weights are frozen; {said}" if footprint.is_frozen else said
    whole = gib(footprint.stored(split | {"fsdp": 1}))
    return f"{said}, whole they would take {whole}"


def _why(mesh: Mesh, split: Split, rows: Rows, slices: int, memory: str) -> str:
    said = []
    if mesh.tensor is None and split["tensor"] > 1:
        devices = math.prod(split.values())
        few = rows.whole is not None and rows.whole < devices
        some = "1 row" if rows.whole == 1 else f"{rows.whole} rows"
        said.append(f"{some} for {devices} devices" if few else "less does not fit")
    said.append(memory)
    if slices > 1:
        over = "data" if split["data"] % slices == 0 else "fsdp"
        over = over if math.gcd(split["data"], slices) in (1, slices) else "data and fsdp"
        said.append(f"{over} over the network between {slices} slices")
    return "; ".join(said)
