"""What devices say to each other in a compiled program: read from its text, for any compiler."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
KINDS += ("collective-broadcast", "ragged-all-to-all")
SCATTERED = "all-reduce-scatter"  # where a TPU sums and keeps a piece, in two operations
WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8}  # others say their bits

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*)$")
_NAME = re.compile(r"^(.*?) ([a-z][a-z\-]*)\(")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MESH = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}"
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """Arrays that devices gather or sum in one operation."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, that the groups of devices span
    bytes: int  # of the arrays when they are whole: gathered, or before they are scattered
    count: int  # times that the program does it


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """All of a program, of which loops of a known length are counted as often as they run.

    `mesh` has the size of each axis, in the order of the devices. A loop whose length is not found
    counts once.
    """
    computations, entry = _computations(text)
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in computations.get(name, []):
            for called, often in _calls(line, computations):
                visit(called, count * often)

    visit(entry, 1)
    # The parts of one that goes on beside other work share its channel.
    channels: dict[str, tuple[tuple[str, tuple[str, ...], int], int]] = {}
    for name, lines in computations.items():
        for number, line in enumerate(lines if times[name] else []):
            for one in _read(line, mesh, name):
                channels[_channel(line) or f"{name} {number}"] = one, times[name]
    found: Counter[tuple[str, tuple[str, ...], int]] = Counter()
    for one, count in channels.values():
        found[one] += count
    return [Collective(*one, count) for one, count in sorted(found.items())]


def _channel(line: str) -> str | None:
    """The channel, with the place in the program: what is written by hand has one for all."""
    found = re.search(r"channel_id=(\d+)", line)
    place = re.search(r'op_name="([^"]*)"', line)
    return found and f"{found[1]} {place[1] if place else ''}"


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    found: dict[str, list[str]] = {}
    entry = here = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            here = opened[1]
            found[here] = []
            entry = here if line.startswith("ENTRY") else entry
        elif body := _OPERATION.match(line):
            found.setdefault(here, []).append(re.sub(r"/\*.*?\*/", "", body[1]))
    return found, entry


def _calls(line: str, computations: Mapping[str, list[str]]) -> Iterator[tuple[str, int]]:
    trips = _trips(line, computations) if " while(" in line else 1
    for names in _CALLED.findall(line):
        for name in names.split(", "):
            yield name.lstrip("%"), trips


def _trips(line: str, computations: Mapping[str, list[str]]) -> int:
    """How often a loop runs: as it says, or else the only number in its condition."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    text = "\n".join(computations.get(condition[1], [])) if condition else ""
    numbers = re.findall(r" constant\((\d+)\)", text)
    return int(numbers[0]) if len(numbers) == 1 else 1


def _read(
    line: str, mesh: Mapping[str, int], computation: str
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    named = _NAME.match(line)
    kind = named[2].removesuffix("-start") if named else ""
    if named is None or kind not in KINDS:
        return
    groups = _groups(line, math.prod(mesh.values()))
    size = _bytes(named[1], kind, is_start=named[2].endswith("-start"))
    if kind == "reduce-scatter":
        size *= len(groups[0])
    if computation.startswith(SCATTERED):
        kind = "reduce-scatter"
    yield kind, _axes(groups, mesh), size


def _bytes(shapes: str, kind: str, *, is_start: bool) -> int:
    sizes = [
        math.prod(int(side) for side in sides.split(",") if side) * _width(of)
        for of, sides in _ARRAY.findall(shapes)
    ]
    # An operation that has begun holds what goes in, and then what comes out.
    if is_start and kind == "all-gather":
        return sum(sizes[len(sizes) // 2 :])
    if is_start and kind == "collective-permute":
        return sizes[1]
    return sum(sizes)


def _width(of: str) -> int:
    bits = re.search(r"\d+", of)
    return WIDTHS.get(of) or max(1, int(bits[0] if bits else 8) // 8)


def _groups(line: str, devices: int) -> list[list[int]]:
    """Which devices speak to each other, in any of the ways that compilers write it."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\d+,\d+", pairs[1])]
    if named := re.search(_MESH, line):
        sides = [int(size) for size in re.findall(r"=(\d+)", named[1])]
        axes = re.findall(r"'(.*?)'=", named[1])
        order = _order(named[2], sides, devices)
        return _along(order, [axes.index(name) for name in re.findall(r"'(.*?)'", named[3])])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line):
        return _order(iota[2], [int(n) for n in iota[1].split(",")], devices).tolist()
    listed = re.search(r"replica_groups=\{(\{.*?\})?\}", line)
    if listed is None or not listed[1]:
        return [list(range(devices))]
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]


def _order(said: str | None, sides: list[int], devices: int) -> np.ndarray:
    """Devices in a grid: as they are numbered, or as `[4,2]T(1,0)` says."""
    if not said:
        return np.arange(devices).reshape(sides)
    shape, _, turned = said.partition("T")
    grid = np.arange(devices).reshape([int(n) for n in re.findall(r"\d+", shape)])
    if turned:
        grid = grid.transpose([int(n) for n in re.findall(r"\d+", turned)])
    return grid.reshape(sides)


def _along(order: np.ndarray, axes: list[int]) -> list[list[int]]:
    inner = [order.shape[axis] for axis in axes]
    moved = np.moveaxis(order, axes, range(order.ndim - len(axes), order.ndim))
    return moved.reshape(-1, math.prod(inner)).tolist()


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest axes of a mesh within which all groups lie."""
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    where = {int(places[at]): at for at in np.ndindex(places.shape)}
    moved = [
        {axis for axis in range(len(mesh)) if len({where[one][axis] for one in group}) > 1}
        for group in groups
    ]
    spanned = set().union(*moved)
    return tuple(name for axis, name in enumerate(mesh) if axis in spanned)
