"""The sizes of a mesh on so many devices, and what does not fit."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from windlass.config import Problem, read
from windlass.devices.mesh import AXES, Mesh, arranged, build, problems, shape, slices
from windlass.devices.mesh_choice import Rows, choose
from windlass.errors import UserError

SIZES = {"heads": 16, "kv_heads": 8, "embed": 1024, "mlp": 3072, "vocab": 50257}


@pytest.mark.parametrize(
    "mesh, devices, expected",
    [
        (Mesh(data="auto"), 1, (1, 1, 1)),
        (Mesh(data="auto"), 8, (8, 1, 1)),
        (Mesh(data=4, tensor="auto"), 8, (4, 1, 2)),
        (Mesh(fsdp=2, tensor="auto"), 8, (1, 2, 4)),
    ],
)
def test_auto_takes_the_devices_that_are_left_and_what_is_not_said_is_then_1(
    mesh, devices, expected
):
    assert shape(mesh, devices) == dict(zip(AXES, expected, strict=True))
    assert problems(mesh, shape(mesh, devices), devices, 16, SIZES) == []


def test_a_mesh_is_built_of_the_given_devices_with_explicit_axes():
    devices = jax.devices("cpu")
    mesh = build({"data": 2, "fsdp": 2, "tensor": 2}, devices)
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert list(mesh.devices.flat) == devices


@dataclass(frozen=True)
class Device:
    """What the mesh asks of an accelerator: its place on the chip and its slice."""

    id: int
    coords: tuple[int, ...]
    slice_index: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0


def tpus(x: int, y: int, slices: int = 1) -> list[Device]:
    """Slices of x by y chips, four to a host."""
    places = [(one, (i, j, 0)) for one in range(slices) for j in range(y) for i in range(x)]
    return [Device(n, coords, one, n // 4) for n, (one, coords) in enumerate(places)]


def steps(grid: np.ndarray, axis: int) -> set[int]:
    """How far apart, in links, the chips are that follow each other along an axis of the mesh."""
    lines = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
    pairs = [(line[i].coords, line[i + 1].coords) for line in lines for i in range(len(line) - 1)]
    return {sum(abs(p - q) for p, q in zip(*pair, strict=True)) for pair in pairs}


@pytest.mark.parametrize("sizes", [(1, 8, 1), (8, 1, 1), (2, 1, 4), (1, 4, 2), (4, 2, 1)], ids=str)
def test_chips_that_follow_each_other_on_an_axis_are_joined_by_a_link(sizes):
    grid = arranged(dict(zip(AXES, sizes, strict=True)), tpus(4, 2))
    assert {device.id for device in grid.flat} == set(range(8))
    assert [steps(grid, axis) <= {1} for axis in range(3)] == [True] * 3


def test_between_slices_goes_data_and_where_there_is_too_little_of_it_fsdp():
    devices = tpus(4, 4, slices=2)
    assert slices(devices) == 2 and slices(tpus(4, 4)) == slices(jax.devices("cpu")) == 1
    grid = arranged({"data": 2, "fsdp": 16, "tensor": 1}, devices)
    assert [{device.slice_index for device in half.flat} for half in grid] == [{0}, {1}]
    grid = arranged({"data": 4, "fsdp": 4, "tensor": 2}, devices)
    assert [{device.slice_index for device in part.flat} for part in grid] == [{0}, {0}, {1}, {1}]
    grid = arranged({"data": 1, "fsdp": 32, "tensor": 1}, devices)
    assert [device.slice_index for device in grid.flat] == [0] * 16 + [1] * 16
    grid = arranged({"data": 2, "fsdp": 32, "tensor": 1}, tpus(4, 4, slices=4))
    assert [{device.slice_index for device in half.flat} for half in grid] == [{0, 1}, {2, 3}]


def test_gpus_of_one_host_are_one_slice_however_many_processes_they_have():
    def gpus(hosts: int, processes: int) -> list[Device]:
        every = [(n, n // 8, n * processes // 8) for n in range(hosts * 8)]
        return [Device(n, (), host, process, "gpu", "NVIDIA H100") for n, host, process in every]

    assert slices(gpus(1, 1)) == slices(gpus(1, 8)) == 1
    grid = arranged({"data": 2, "fsdp": 4, "tensor": 2}, gpus(2, 8))
    assert [{device.slice_index for device in half.flat} for half in grid] == [{0}, {1}]
    # A count that leaves one host with fewer of them.
    grid = arranged({"data": 1, "fsdp": 12, "tensor": 1}, gpus(2, 1)[:12])
    assert [device.id for device in grid.flat] == list(range(12))


def test_a_part_of_a_slice_that_is_no_rectangle_is_laid_out_as_it_comes():
    grid = arranged({"data": 1, "fsdp": 6, "tensor": 1}, tpus(4, 2)[:6])
    assert [device.id for device in grid.flat] == [0, 1, 2, 3, 4, 5]


def test_tensor_does_not_go_between_slices():
    split = {"data": 1, "fsdp": 1, "tensor": 8}
    assert problems(Mesh(**split), split, 8, 8, SIZES, slices=2) == [
        (
            "mesh",
            "is data 1 × fsdp 1 × tensor 8 on 2 slices, whose network is too slow for tensor: "
            "data × fsdp is 1, and must be a multiple of 2",
        )
    ]
    split = {"data": 2, "fsdp": 2, "tensor": 2}
    assert problems(Mesh(**split), split, 8, 8, SIZES, slices=4) == []


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"data": 0, "tensor": -2},
            "2 problems in the recipe:\n"
            "  data    is 0; it must be 1 or more\n"
            "  tensor  is -2; it must be 1 or more",
        ),
        (
            {"tensor": "auto", "fsdp": "auto"},
            "1 problem in the recipe:\n  tensor  is auto, and so is fsdp; at most one size can be",
        ),
        (
            {"tensor": "all"},
            '1 problem in the recipe:\n  tensor  is "all"; it must be a whole number, auto or null',
        ),
    ],
)
def test_sizes_that_no_mesh_can_have_are_refused(given, message):
    with pytest.raises(UserError) as refusal:
        read(Mesh, given)
    assert str(refusal.value) == message


def wrong(mesh: Mesh, devices: int, rows: int, sizes: dict[str, int]) -> list[Problem]:
    split = choose(mesh, devices, rows=Rows(rows, None), sizes=sizes, footprint=None).split
    return problems(mesh, split, devices, rows, sizes)


@pytest.mark.parametrize(
    "mesh, devices, key, what",
    [
        (
            Mesh(tensor=3),
            8,
            "mesh.tensor",
            "is 3; it must divide the 8 devices: 1, 2, 4 or 8",
        ),
        (
            Mesh(fsdp=5),
            8,
            "mesh.fsdp",
            "is 5; it must divide the 8 devices: 1, 2, 4 or 8",
        ),
        (
            Mesh(data=2, fsdp=2),
            8,
            "mesh",
            "is data 2 × fsdp 2 × tensor 1 = 4, and there are 8 devices; mesh.data=auto, "
            "mesh.fsdp=auto, mesh.tensor=auto or device.count=4 would do",
        ),
        (
            Mesh(data=3, tensor=2),
            8,
            "mesh",
            "is data 3 × tensor 2 = 6; it must divide the 8 devices: 1, 2, 4 or 8",
        ),
        (Mesh(data=2), 1, "mesh.data", "is 2; there is 1 device: 1 would do"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_met_with_what_would(mesh, devices, key, what):
    assert wrong(mesh, devices, 16, SIZES) == [(key, what)]


def test_what_is_offered_in_place_of_a_tensor_fits_devices_and_heads():
    sizes = {"heads": 12, "kv_heads": 2, "mlp": 100}
    assert wrong(Mesh(tensor=3), 8, 8, sizes) == [
        ("mesh.tensor", "is 3; it must divide the 8 devices: 1, 2 or 4")
    ]
    assert wrong(Mesh(data=3, tensor=8), 16, 8, sizes) == [
        ("mesh", "is data 3 × tensor 8 = 24; it must divide the 16 devices: 1, 2, 4, 8 or 16"),
        (
            "mesh.tensor",
            "is 8; it must divide model.heads (12), model.mlp (100) and "
            "model.kv_heads (2) or be a multiple of it: 1, 2 or 4",
        ),
    ]


def test_heads_and_the_mlp_must_come_apart_and_rows_must_go_round():
    sizes = {"heads": 12, "kv_heads": 2, "mlp": 100}
    assert wrong(Mesh(fsdp=2, tensor="auto"), 16, 13, sizes) == [
        (
            "mesh.tensor",
            "is 8; it must divide model.heads (12), model.mlp (100) and "
            "model.kv_heads (2) or be a multiple of it: 1, 2 or 4",
        ),
        (
            "mesh",
            "gives the 13 rows of a microbatch to data 1 × fsdp 2 = 2 devices; "
            "12 or 14 rows or device.count=8 without mesh.data and mesh.fsdp would do",
        ),
    ]


@pytest.mark.parametrize(
    "mesh, devices, rows, ways, would",
    [
        (Mesh(fsdp=8), 8, 4, "fsdp 8 = 8", "8 rows or data × fsdp 1, 2 or 4"),
        (Mesh(), 6, 16, "fsdp 6 = 6", "12 or 18 rows or device.count=4"),
        (Mesh(tensor=2), 12, 16, "fsdp 6 = 6", "12 or 18 rows or device.count=8"),
    ],
)
def test_rows_that_do_not_go_round_are_met_with_rows_groups_and_devices_that_would(
    mesh, devices, rows, ways, would
):
    what = f"gives the {rows} rows of a microbatch to data 1 × {ways} devices; {would} would do"
    assert wrong(mesh, devices, rows, SIZES) == [("mesh", what)]


def test_no_axis_is_offered_the_devices_that_are_left_where_model_or_rows_would_not_take_it():
    what = "is data 2 × fsdp 2 × tensor 1 = 4, and there are 8 devices; "
    offers = {
        (4, 16): "mesh.tensor=auto or device.count=4",
        (16, 15): "mesh.data=auto, mesh.fsdp=auto or device.count=4",
    }
    for (rows, heads), offer in offers.items():
        found = wrong(Mesh(data=2, fsdp=2), 8, rows, SIZES | {"heads": heads, "kv_heads": heads})
        assert found == [("mesh", f"{what}{offer} would do")]


def test_key_and_value_heads_may_be_repeated_but_not_torn():
    assert wrong(Mesh(tensor=8), 8, 8, {"heads": 16, "kv_heads": 2}) == []
    assert wrong(Mesh(tensor=2), 8, 8, {"heads": 12, "kv_heads": 3}) == [
        (
            "mesh.tensor",
            "is 2; it must divide model.heads (12) and "
            "model.kv_heads (3) or be a multiple of it: 1",
        )
    ]


def test_experts_must_come_apart_and_their_axis_is_there_where_it_divides():
    sizes = SIZES | {"experts": 6}
    assert wrong(Mesh(expert=2), 8, 8, sizes) == []
    assert wrong(Mesh(expert=4), 8, 8, sizes) == [
        ("mesh.expert", "is 4; it must divide model.experts (6): 1 or 2")
    ]
    assert wrong(Mesh(expert=2), 8, 8, SIZES) == [
        ("mesh.expert", "is 2; this model has no experts: 1 would do")
    ]
    assert wrong(Mesh(data=2, fsdp=1, expert=2), 4, 6, sizes) == [
        (
            "mesh",
            "gives the 6 rows of a microbatch to data 2 × fsdp 1 × expert 2 = 4 devices; "
            "4 or 8 rows or data × fsdp × expert 1 or 2 would do",
        )
    ]
    split = choose(Mesh(expert=2), 8, rows=Rows(8, None), sizes=sizes, footprint=None).split
    assert split == {"data": 1, "fsdp": 4, "expert": 2, "tensor": 1}
    assert build(split, jax.devices("cpu")).axis_names == ("data", "fsdp", "expert", "tensor")


def test_a_width_that_is_kept_whole_is_no_problem():
    assert wrong(Mesh(tensor=2), 8, 8, {"vocab": 50257, "embed": 1023}) == []
