"""The sizes of a mesh on so many devices, and what does not fit."""

import jax
import pytest
from jax.sharding import AxisType

from windlass.config import read
from windlass.devices.mesh import Mesh, build, problems, shape
from windlass.errors import UserError

SIZES = {"heads": 16, "kv_heads": 8, "embed": 1024, "mlp": 3072, "vocab": 50257}


@pytest.mark.parametrize(
    "mesh, devices, expected",
    [
        (Mesh(), 1, (1, 1, 1)),
        (Mesh(), 8, (1, 8, 1)),
        (Mesh(data="auto", fsdp=1), 8, (8, 1, 1)),
        (Mesh(data=2, tensor=2), 8, (2, 2, 2)),
        (Mesh(data=4, fsdp=1, tensor=2), 8, (4, 1, 2)),
        (Mesh(fsdp=2, tensor="auto"), 8, (1, 2, 4)),
    ],
)
def test_auto_takes_the_devices_that_are_left(mesh, devices, expected):
    assert shape(mesh, devices) == dict(zip(("data", "fsdp", "tensor"), expected, strict=True))
    assert problems(mesh, devices, 16, SIZES) == []


def test_a_mesh_is_built_of_the_given_devices_with_explicit_axes():
    devices = jax.devices("cpu")[:1]
    mesh = build(Mesh(), devices)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert list(mesh.devices.flat) == devices


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
            {"tensor": "auto"},
            "1 problem in the recipe:\n  tensor  is auto, and so is fsdp; at most one size can be",
        ),
        (
            {"tensor": "all"},
            '1 problem in the recipe:\n  tensor  is "all"; it must be a whole number or auto',
        ),
    ],
)
def test_sizes_that_no_mesh_can_have_are_refused(given, message):
    with pytest.raises(UserError) as refusal:
        read(Mesh, given)
    assert str(refusal.value) == message


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
            Mesh(data=3, tensor=2),
            8,
            "mesh",
            "is data 3 × tensor 2 = 6; it must divide the 8 devices: 1, 2, 4 or 8",
        ),
        (Mesh(data=2), 1, "mesh.data", "is 2; there is 1 device"),
        (
            Mesh(data=1, fsdp=2, tensor=2),
            8,
            "mesh",
            "is data 1 × fsdp 2 × tensor 2 = 4, and there are 8 devices; mesh.data=auto, "
            "mesh.fsdp=auto, mesh.tensor=auto or device.count=4 would do",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_met_with_what_would(mesh, devices, key, what):
    assert problems(mesh, devices, 16, SIZES) == [(key, what)]


def test_heads_and_the_mlp_must_come_apart_and_rows_must_go_round():
    sizes = {"heads": 12, "kv_heads": 2, "mlp": 100}
    assert problems(Mesh(fsdp=2, tensor="auto"), 16, 13, sizes) == [
        (
            "mesh.tensor",
            "is 8; it must divide model.heads (12), model.mlp (100) and "
            "model.kv_heads (2) or be a multiple of it: 1, 2 or 4",
        ),
        (
            "mesh",
            "gives the 13 rows of a microbatch to data 1 × fsdp 2 = 2 devices; "
            "12 or 14 rows would do, or data × fsdp 1",
        ),
    ]


def test_fewer_rows_than_devices_are_met_with_enough():
    assert problems(Mesh(), 8, 4, SIZES) == [
        (
            "mesh",
            "gives the 4 rows of a microbatch to data 1 × fsdp 8 = 8 devices; "
            "8 rows would do, or data × fsdp 1, 2 or 4",
        )
    ]


def test_key_and_value_heads_may_be_repeated_but_not_torn():
    assert problems(Mesh(tensor=8), 8, 8, {"heads": 16, "kv_heads": 2}) == []
    assert problems(Mesh(tensor=2), 8, 8, {"heads": 12, "kv_heads": 3}) == [
        (
            "mesh.tensor",
            "is 2; it must divide model.heads (12) and "
            "model.kv_heads (3) or be a multiple of it: 1",
        )
    ]


def test_a_width_that_is_kept_whole_is_no_problem():
    assert problems(Mesh(tensor=2), 8, 8, {"vocab": 50257, "embed": 1023}) == []
