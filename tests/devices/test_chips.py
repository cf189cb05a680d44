"""Chips by the names JAX gives them."""

import pytest

from windlass.devices import chips


@pytest.mark.parametrize(
    "device_kind, name, bfloat16, gib",
    [
        ("TPU v3", "TPU v3", 61.5e12, 16),
        ("TPU v4", "TPU v4", 275e12, 30.75),
        ("TPU v5 lite", "TPU v5e", 197e12, 15.75),
        ("TPU v5p", "TPU v5p", 459e12, 95.74),
        ("TPU v5", "TPU v5p", 459e12, 95.74),
        ("TPU v6 lite", "TPU v6e", 918e12, 31.25),
        ("TPU7x", "TPU 7x", 1153.5e12, 96),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312e12, 40e9 / 2**30),
        ("NVIDIA H200", "H200", 989e12, 141e9 / 2**30),
    ],
)
def test_a_chip_is_found_by_the_name_jax_gives_it(device_kind, name, bfloat16, gib):
    chip = chips.find(device_kind)
    assert chip is not None and chip.name == name
    assert chip.peak["bfloat16"] == bfloat16
    assert chip.memory_bytes / 2**30 == pytest.approx(gib)
    assert chip.kind == ("tpu" if "TPU" in device_kind else "gpu")


def test_a_t4_has_no_bfloat16():
    chip = chips.find("Tesla T4")
    assert chip is not None and not chip.has_bfloat16
    assert chip.peak == {"float16": 65e12}


def test_a_chip_that_is_not_listed_is_not_guessed():
    assert chips.find("cpu") is None
    assert chips.find("NVIDIA H100 PCIe") is None
