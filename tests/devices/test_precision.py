"""The number format of each device, and the one that is refused."""

import pytest

from windlass.devices.chips import find
from windlass.devices.precision import Precision, resolve, warnings
from windlass.errors import UserError


@pytest.mark.parametrize(
    "kind, device_kind, expected",
    [
        ("tpu", "TPU v5 lite", "bfloat16"),
        ("tpu", "a TPU of tomorrow", "bfloat16"),
        ("gpu", "NVIDIA H200", "bfloat16"),
        ("gpu", "a GPU of tomorrow", "bfloat16"),
        ("gpu", "Tesla T4", "float16"),
        ("gpu", "Tesla V100-SXM2-16GB", "float16"),
        ("cpu", "cpu", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_chip_has_it_and_float16_on_gpus_that_have_not(
    kind, device_kind, expected
):
    assert resolve(Precision(), kind, find(device_kind)) == expected
    assert warnings(Precision(), kind, find(device_kind)) == []


def test_what_is_asked_for_is_used():
    assert resolve(Precision(compute="float32"), "tpu", None) == "float32"
    assert resolve(Precision(compute="bfloat16"), "cpu", None) == "bfloat16"
    assert resolve(Precision(compute="float16"), "cpu", None) == "float16"
    assert resolve(Precision(compute="float16"), "gpu", find("NVIDIA H200")) == "float16"


def test_bfloat16_where_it_does_not_pay_is_warned_about():
    asked = Precision(compute="bfloat16")
    assert warnings(asked, "cpu", None) == [
        "precision.compute is bfloat16, and this CPU is usually slower in it than in float32"
    ]
    assert warnings(asked, "gpu", find("Tesla T4")) == [
        "precision.compute is bfloat16, and T4 is usually slower in it than in float32"
    ]
    assert warnings(asked, "gpu", find("NVIDIA H200")) == []


def test_float16_is_warned_about_on_a_cpu_alone():
    asked = Precision(compute="float16")
    assert warnings(asked, "cpu", None) == [
        "precision.compute is float16, and this CPU is usually slower in it than in float32"
    ]
    assert warnings(asked, "gpu", find("Tesla T4")) == []
    assert warnings(asked, "gpu", find("NVIDIA H200")) == []


def test_float16_on_a_tpu_is_refused_with_the_reason():
    with pytest.raises(UserError) as refusal:
        resolve(Precision(compute="float16"), "tpu", find("TPU v5 lite"))
    assert str(refusal.value) == (
        "precision.compute is float16; the matrix units of a TPU do not take it: "
        "bfloat16, float32 or auto would do"
    )
