"""The device mesh: how many ways data, weights and matmuls are split."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from windlass.config import Problem, listing, section
from windlass.devices.axes import ROWS

AXES: tuple[str, ...] = ("data", "fsdp", "tensor")
ALL: tuple[str, ...] = ("data", "fsdp", "expert", "tensor")  # expert where it divides something
KV_HEADS = ("kv_heads", "global_kv_heads")  # sizes of a model
Size = int | Literal["auto"]


@section
class Mesh:
    """Device mesh, data × fsdp × expert × tensor; sizes that are not given are chosen.

    They follow from the model, the batch and the chip, and the run reports why. At most one size
    is auto: it takes the devices that are left, and those not given are then 1.
    """

    data: Size | None = None  # data parallelism: replicas of the model
    fsdp: Size | None = None  # fully sharded data parallelism: shards of the weights
    # expert parallelism: shards of the experts, to which tokens go; data parallelism elsewhere
    expert: Size | None = None
    tensor: Size | None = None  # tensor parallelism: shards of each matmul

    def __post_init__(self):
        small = [name for name in ALL if axis_size(self, name) < 1]
        if small:
            sizes = [f"{name} is {axis_size(self, name)}; it must be 1 or more" for name in small]
            raise ValueError(*sizes)
        auto = [name for name in ALL if getattr(self, name) == "auto"]
        if len(auto) > 1:
            raise ValueError(f"{auto[1]} is auto, and so is {auto[0]}; at most one size can be")


def axis_size(mesh: Mesh, name: str) -> int:
    """The size that a recipe gives an axis, 1 where it gives none."""
    size = getattr(mesh, name)
    return size if isinstance(size, int) else 1


def is_open(mesh: Mesh) -> bool:
    """True where a size is left open. Tensor and expert are never chosen to use up devices."""
    sizes = [getattr(mesh, name) for name in ALL]
    return "auto" not in sizes and None in (mesh.data, mesh.fsdp)


def shape(mesh: Mesh, devices: int) -> dict[str, int]:
    """Mesh shape on `devices` devices, where no axis size is to be chosen."""
    sizes = {name: axis_size(mesh, name) for name in ALL}
    rest = devices // math.prod(sizes.values())
    split = {name: rest if getattr(mesh, name) == "auto" else size for name, size in sizes.items()}
    return {name: split[name] for name in axes(split)}


def axes(split: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh: that of experts is one where it is larger than 1."""
    return ALL if split.get("expert", 1) > 1 else AXES


def row_groups(split: Mapping[str, int]) -> int:
    """The number of groups of devices with rows of their own: data × fsdp × expert."""
    return math.prod(split.get(name, 1) for name in ROWS)


def slices(devices: Sequence[Any]) -> int:
    """The number of slices: groups of devices that only the data-center network joins.

    They are slices of TPUs, and hosts of GPUs. Processes on CPUs are for trying things out.
    """
    return len({_slice(device) for device in devices})


def problems(
    mesh: Mesh,
    split: Mapping[str, int],
    devices: int,
    rows: int | None,
    sizes: Mapping[str, int],
    slices: int = 1,
) -> list[Problem]:
    """Problems of a mesh: with the devices, with the rows of a microbatch, with a model.

    `rows` is None where they follow from the split. `sizes` are the sizes of a model's named axes.
    Heads and the MLP are computed in pieces, so `tensor` must divide them; other axes that it does
    not divide are kept whole.
    """
    fixed = math.prod(axis_size(mesh, name) for name in ALL)
    if devices % fixed:
        return _too_many(mesh, devices, fixed, sizes)
    product = math.prod(split.values())
    conflicts = [
        *_tensor(split["tensor"], devices, sizes),
        *_expert(split.get("expert", 1), devices, sizes),
    ]
    if product != devices:
        autos = []
        for name in AXES:
            other = dataclasses.replace(mesh, **{name: "auto"})
            if not problems(other, shape(other, devices), devices, rows, sizes, slices):
                autos.append(f"mesh.{name}=auto")
        what = f"is {_product(split, split)} = {product}, and there are {devices} devices"
        would = listing([*autos, f"device.count={product}"])
        return [("mesh", f"{what}; {would} would do"), *conflicts]
    if rows is not None and rows % (ways := row_groups(split)):
        near = [size for size in (rows // ways * ways, rows // ways * ways + ways) if size]
        what = f"gives the {rows} rows of a microbatch to {_product(split, _rows(split))}"
        would = " or ".join([f"{listing(near)} rows", *fewer(mesh, split, rows, devices, sizes)])
        conflicts.append(("mesh", f"{what} = {ways} devices; {would} would do"))
    return [*conflicts, *_slices(split, slices)]


def fewer(
    mesh: Mesh, split: Mapping[str, int], rows: int, devices: int, sizes: Mapping[str, int]
) -> list[str]:
    """Meshes that would do instead, so that each group of devices has as many sequences."""
    groups = [
        size for size in divisors(devices) if rows % size == 0 and divides(devices // size, sizes)
    ]
    offered = [f"{' × '.join(_rows(split))} {listing(groups)}"] if groups else []
    ways = range(1, row_groups(split))
    most = split["tensor"] * max((size for size in ways if rows % size == 0), default=1)
    if mesh.data is None and mesh.fsdp is None:
        return [*offered, f"device.count={most}"]
    return offered or [f"device.count={most} without mesh.data and mesh.fsdp"]


def divides(tensor: int, sizes: Mapping[str, int]) -> bool:
    """True where tensor parallelism of `tensor` ways divides a model of these sizes."""
    whole = all(sizes[name] % tensor == 0 for name in ("heads", "mlp") if name in sizes)
    # Fewer key and value heads than pieces are repeated, which must come out even.
    kv_heads = [sizes[name] for name in KV_HEADS if name in sizes]
    return whole and all(heads % tensor == 0 or tensor % heads == 0 for heads in kv_heads)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def build(split: Mapping[str, int], devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The mesh itself, with explicit axes: a layout that does not fit is an error when traced."""
    explicit = (AxisType.Explicit,) * len(axes(split))
    return jax.sharding.Mesh(arranged(split, devices), axes(split), axis_types=explicit)


def arranged(split: Mapping[str, int], devices: Sequence[Any]) -> np.ndarray:
    """Device array of a mesh, in which neighbours are neighbours on the interconnect.

    Between slices goes `data`, which communicates least, or as much of `fsdp` as it takes.
    """
    sizes = tuple(split[name] for name in axes(split))
    members = Counter(_slice(device) for device in devices)
    count = len(members)
    if count == 1:
        return _within(sizes, devices)
    if len(set(members.values())) > 1:  # a part of one of them
        return _array(devices).reshape(sizes)
    data = math.gcd(split["data"], count)
    outer = (data, count // data, *[1] * (len(sizes) - 2))
    return mesh_utils.create_hybrid_device_mesh(
        tuple(size // ways for size, ways in zip(sizes, outer, strict=True)),
        outer,
        devices,
        process_is_granule=not hasattr(devices[0], "slice_index"),
        allow_split_physical_axes=True,
    )


def _slice(device: Any) -> int:
    if device.platform == "cpu":
        return 0
    # Chips that are only described, for a compiler, are of one slice. GPUs of one host have the
    # same index, also where each of them has a process.
    otherwise = 0 if device.platform == "tpu" else device.process_index
    return getattr(device, "slice_index", otherwise)


def _place(device: Any) -> tuple[int, ...]:
    return (*device.coords, getattr(device, "core_on_chip", 0))


def _within(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """The devices of one slice in a grid."""
    if devices[0].platform == "tpu":
        at = np.array([_place(device) for device in devices])
        box = np.ptp(at, axis=0) + 1
        if np.prod(box) != len(devices):  # a part of a slice, of no shape that links follow
            return _array(devices).reshape(sizes)
        # Where the chips lie as the axes do, they stay: JAX would bend eight of them into a ring.
        lies = _order(box, sizes)
        if lies is not None:
            return _array(sorted(devices, key=_place)).reshape(box).transpose(lies).reshape(sizes)
    return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _order(box: np.ndarray, sizes: tuple[int, ...]) -> list[int] | None:
    """The axes of a box in the order of a grid with the same sides, two or more; else None."""
    sides, left = [size for size in sizes if size > 1], list(range(len(box)))
    lies = []
    for side in sides:
        if (fits := next((axis for axis in left if box[axis] == side), None)) is None:
            return None
        left.remove(fits)
        lies.append(fits)
    return [*lies, *left] if len(sides) > 1 else None


def _array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), object)
    array[:] = devices
    return array


def _too_many(mesh: Mesh, devices: int, product: int, model: Mapping[str, int]) -> list[Problem]:
    sizes = {name: axis_size(mesh, name) for name in ALL if axis_size(mesh, name) > 1}
    works = divisors(devices)
    if list(sizes) == ["tensor"]:
        works = [size for size in works if divides(size, model)]
    fits = f"it must divide the {devices} devices: {listing(works)}"
    if devices == 1:
        fits = "there is 1 device: 1 would do"
    if len(sizes) == 1:
        (name,) = sizes
        return [(f"mesh.{name}", f"is {product}; {fits}")]
    torn = _tensor(axis_size(mesh, "tensor"), devices, model)
    return [("mesh", f"is {_product(sizes, sizes)} = {product}; {fits}"), *torn]


def _tensor(tensor: int, devices: int, sizes: Mapping[str, int]) -> list[Problem]:
    if divides(tensor, sizes):
        return []
    multiples = [f"model.{name} ({sizes[name]})" for name in ("heads", "mlp") if name in sizes]
    for name in KV_HEADS:
        if name in sizes:
            multiples.append(f"model.{name} ({sizes[name]}) or be a multiple of it")
    works = listing(size for size in divisors(devices) if divides(size, sizes))
    return [("mesh.tensor", f"is {tensor}; it must divide {listing(multiples, 'and')}: {works}")]


def _expert(expert: int, devices: int, sizes: Mapping[str, int]) -> list[Problem]:
    experts = sizes.get("experts", 1)
    if experts % expert == 0:
        return []
    if "experts" not in sizes:
        return [("mesh.expert", f"is {expert}; this model has no experts: 1 would do")]
    works = listing(size for size in divisors(devices) if experts % size == 0)
    return [("mesh.expert", f"is {expert}; it must divide model.experts ({experts}): {works}")]


def _slices(split: Mapping[str, int], slices: int) -> list[Problem]:
    ways = split["data"] * split["fsdp"]
    # What data leaves over of the slices, fsdp must take.
    if split["fsdp"] % (slices // math.gcd(split["data"], slices)) == 0:
        return []
    what = f"is {_product(split, split)} on {slices} slices, whose network is too slow for tensor"
    return [("mesh", f"{what}: data × fsdp is {ways}, and must be a multiple of {slices}")]


def _rows(split: Mapping[str, int]) -> list[str]:
    return [name for name in ROWS if name in split]


def _product(sizes: Mapping[str, int], names: Iterable[str]) -> str:
    return " × ".join(f"{name} {sizes[name]}" for name in names)
