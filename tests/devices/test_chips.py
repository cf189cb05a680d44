"""Chips by the names JAX gives them."""

import pytest

from windlass.devices import chips
from windlass.errors import UserError


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
    assert chip.peak == {"float16": 65e12, "float32": 8.1e12, "int8": 130e12}


def test_a_chip_that_is_not_listed_is_not_guessed():
    assert chips.find("cpu") is None
    assert chips.find("NVIDIA H100 PCIe") is None


@pytest.mark.parametrize(
    "device_kind, products, bandwidth",
    [
        # Products for each byte of memory, by "How to scale your model" and NVIDIA's data sheets.
        ("TPU v5 lite", 240, 819e9),
        ("TPU v5p", 166, 2765e9),
        ("TPU v6 lite", 560, 1640e9),
        ("TPU7x", 312, 3690e9),
        ("TPU v3", 137, 450e9),
        ("NVIDIA H100 80GB HBM3", 295, 3350e9),
        ("NVIDIA H200", 206, 4800e9),
    ],
)
def test_products_and_bandwidth_are_of_the_same_device(device_kind, products, bandwidth):
    chip = chips.find(device_kind)
    assert chip is not None and chip.bandwidth == bandwidth
    assert chip.peak["bfloat16"] / bandwidth == pytest.approx(products, rel=0.01)


def test_every_chip_has_what_a_plan_needs_and_a_name_of_its_own():
    every = chips.every()
    assert len({chip.slug for chip in every}) == len(every)
    for chip in every:
        assert chip.bandwidth and chip.memory_bytes and chip.peak, chip.name
        assert (chip.link is None) == (chip.name == "TPU 8i"), chip.name
        assert (chip.tile is None) == (chip.kind == "gpu"), chip.name
        assert {"bfloat16", "float16"} & set(chip.peak), chip.name


def test_jax_takes_three_quarters_of_what_a_driver_reports_unless_it_is_told():
    chip = chips.find("NVIDIA H200")
    assert chip is not None
    limit = 112583507968  # `bytes_limit` of an H200, measured
    assert chips.usable(chip, {}) == pytest.approx(limit, rel=1e-4)
    more = chips.usable(chip, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"})
    assert more == pytest.approx(limit * 0.9 / 0.75, rel=1e-4)
    tpu = chips.find("TPU v6 lite")
    assert (
        tpu is not None and chips.usable(tpu, {"XLA_CLIENT_MEM_FRACTION": "0.5"}) == 31.25 * 2**30
    )
    with pytest.raises(UserError) as refusal:
        chips.usable(chip, {"XLA_CLIENT_MEM_FRACTION": "most"})
    assert str(refusal.value) == ('XLA_CLIENT_MEM_FRACTION is "most"; it must be a number, as 0.9')
