"""The mesh a run is laid out on: how many ways data, weights and matrices are split."""

import math
from collections.abc import Iterable
from typing import Literal

import jax
from jax.sharding import AxisType

from windlass.config import Problem, listing, section

AXES = ("data", "fsdp", "tensor")
Size = int | Literal["auto"]


@section
class Mesh:
    """Devices in a grid, data × fsdp × tensor; at most one size is auto, and takes the rest."""

    data: Size = 1  # copies of the model, each with its own rows
    fsdp: Size = "auto"  # pieces the weights are stored in, each piece with its own rows
    tensor: Size = 1  # pieces each matrix is computed in, all on the same rows

    def __post_init__(self):
        small = [name for name in AXES if _given(self, name) < 1]
        if small:
            sizes = [f"{name} is {_given(self, name)}; it must be 1 or more" for name in small]
            raise ValueError(*sizes)
        auto = [name for name in AXES if getattr(self, name) == "auto"]
        if len(auto) > 1:
            raise ValueError(f"{auto[1]} is auto, and so is {auto[0]}; at most one size can be")


def shape(mesh: Mesh, devices: int) -> dict[str, int]:
    """The size of each axis on so many devices; `problems` says when they do not fit."""
    sizes = {name: _given(mesh, name) for name in AXES}
    rest = devices // math.prod(sizes.values())
    return {name: rest if getattr(mesh, name) == "auto" else size for name, size in sizes.items()}


def problems(mesh: Mesh, devices: int, rows: int, sizes: dict[str, int]) -> list[Problem]:
    """What does not fit: on the devices, with the rows of a microbatch, with a model's widths.

    `sizes` are the sizes of a model's named axes. Heads and the MLP are computed in pieces, so
    `tensor` must divide them; other axes that it does not divide are kept whole.
    """
    given = math.prod(_given(mesh, name) for name in AXES)
    if devices % given:
        return [_too_many(mesh, devices, given)]
    split = shape(mesh, devices)
    product = math.prod(split.values())
    if product != devices:
        autos = [f"mesh.{name}=auto" for name in AXES]
        what = f"is {_product(split, AXES)} = {product}, and there are {devices} devices"
        return [("mesh", f"{what}; {listing([*autos, f'device.count={product}'])} would do")]
    return [*_tensor(split["tensor"], devices, sizes), *_rows(split, devices, rows)]


def build(mesh: Mesh, devices: list) -> jax.sharding.Mesh:
    """The mesh itself, with explicit axes: a layout that does not fit is an error when traced."""
    sizes = shape(mesh, len(devices))
    explicit = (AxisType.Explicit,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=explicit, devices=devices)


def _given(mesh: Mesh, name: str) -> int:
    size = getattr(mesh, name)
    return 1 if size == "auto" else size


def _too_many(mesh: Mesh, devices: int, given: int) -> Problem:
    sizes = {name: _given(mesh, name) for name in AXES if _given(mesh, name) > 1}
    fits = f"it must divide the {devices} devices: {listing(_divisors(devices))}"
    if devices == 1:
        fits = "there is 1 device"
    if len(sizes) == 1:
        (name,) = sizes
        return f"mesh.{name}", f"is {given}; {fits}"
    return "mesh", f"is {_product(sizes, sizes)} = {given}; {fits}"


def _tensor(tensor: int, devices: int, sizes: dict[str, int]) -> list[Problem]:
    def fits(pieces: int) -> bool:
        kv_heads = sizes.get("kv_heads", pieces)
        whole = all(sizes[name] % pieces == 0 for name in ("heads", "mlp") if name in sizes)
        # Fewer key and value heads than pieces are repeated, which must come out even.
        return whole and (kv_heads % pieces == 0 or pieces % kv_heads == 0)

    if fits(tensor):
        return []
    named = [f"model.{name} ({sizes[name]})" for name in ("heads", "mlp") if name in sizes]
    if "kv_heads" in sizes:
        named.append(f"model.kv_heads ({sizes['kv_heads']}) or be a multiple of it")
    works = listing(size for size in _divisors(devices) if fits(size))
    return [("mesh.tensor", f"is {tensor}; it must divide {listing(named, 'and')}: {works}")]


def _rows(split: dict[str, int], devices: int, rows: int) -> list[Problem]:
    ways = split["data"] * split["fsdp"]
    if rows % ways == 0:
        return []
    near = [size for size in (rows // ways * ways, rows // ways * ways + ways) if size]
    fewer = [size for size in _divisors(devices) if rows % size == 0]
    what = f"gives the {rows} rows of a microbatch to {_product(split, ('data', 'fsdp'))} = {ways}"
    return [
        ("mesh", f"{what} devices; {listing(near)} rows would do, or data × fsdp {listing(fewer)}")
    ]


def _product(sizes: dict[str, int], names: Iterable[str]) -> str:
    return " × ".join(f"{name} {sizes[name]}" for name in names)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
