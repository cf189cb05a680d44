"""Slices against Google's pages on each generation, and the names that there are not."""

import math

import pytest

from windlass.devices import chips, slices
from windlass.errors import UserError

# Name, chips, JAX devices, hosts, topology, machine type, accelerator type, runtime version.
KNOWN = [
    ("v2-8", 4, 8, 1, "2x2", None, "v2-8", "tpu-ubuntu2204-base"),
    ("v3-8", 4, 8, 1, "2x2", "ct3-hightpu-4t", "v3-8", "tpu-ubuntu2204-base"),
    ("v4-8", 4, 4, 1, "2x2x1", "ct4p-hightpu-4t", "v4-8", "tpu-ubuntu2204-base"),
    ("v5e-1", 1, 1, 1, "1x1", "ct5lp-hightpu-1t", "v5litepod-1", "v2-alpha-tpuv5-lite"),
    ("v5e-8", 8, 8, 1, "2x4", "ct5lp-hightpu-8t", "v5litepod-8", "v2-alpha-tpuv5-lite"),
    ("v5e-16", 16, 16, 4, "4x4", "ct5lp-hightpu-4t", "v5litepod-16", "v2-alpha-tpuv5-lite"),
    ("v5p-8", 4, 4, 1, "2x2x1", "ct5p-hightpu-4t", "v5p-8", "v2-alpha-tpuv5"),
    ("v5p-128", 64, 64, 16, "4x4x4", "ct5p-hightpu-4t", "v5p-128", "v2-alpha-tpuv5"),
    ("v5p-12288", 6144, 6144, 1536, "16x16x24", "ct5p-hightpu-4t", "v5p-12288", "v2-alpha-tpuv5"),
    ("v6e-1", 1, 1, 1, "1x1", "ct6e-standard-1t", "v6e-1", "v2-alpha-tpuv6e"),
    ("v6e-8", 8, 8, 1, "2x4", "ct6e-standard-8t", "v6e-8", "v2-alpha-tpuv6e"),
    ("v6e-256", 256, 256, 64, "16x16", "ct6e-standard-4t", "v6e-256", "v2-alpha-tpuv6e"),
    ("7x-2", 1, 2, 1, "1x1x1", "tpu7x-standard-1t", None, None),
    ("7x-8", 4, 8, 1, "2x2x1", "tpu7x-standard-4t", None, None),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known[0])
def test_a_slice_is_as_large_as_google_says(known):
    name, *facts = known
    found = slices.find(name)
    one = found.each
    assert found.count == 1 and found.name == name
    assert facts == [
        *(found.chips, found.devices, found.hosts, one.topology),
        *(one.machine_type, one.accelerator_type, one.runtime),
    ]


def test_every_slice_has_whole_hosts_of_a_chip_in_the_catalogue_and_a_zone():
    for one in slices.every():
        assert one.chips_per_host * one.hosts == one.chips, one.name
        assert chips.find(one.device_kind) is not None, one.name
        assert one.zones and all(zone.count("-") == 2 for zone in one.zones), one.name
        assert (one.machine_type is None) == (one.label is None), one.name


def test_several_slices_are_counted_together():
    two = slices.find("2xv6e-16")
    assert (two.count, two.each.name, two.name) == (2, "v6e-16", "2xv6e-16")
    assert (two.chips, two.devices, two.hosts) == (32, 32, 8)
    assert slices.find("2x7x-8").chips == 8


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("v5litepod-8", "v5e-8"),
        ("tpu-v6e-8", "v6e-8"),
        ("TPU-V5P-8", "v5p-8"),
        ("tpu7x-8", "7x-8"),
        ("v7x-8", "7x-8"),
        ("2xv5litepod-16", "2xv5e-16"),
    ],
)
def test_a_slice_is_found_by_the_names_that_others_give_it(spelled, name):
    assert slices.find(spelled).name == name


V6E = "v6e-1, v6e-4, v6e-8, v6e-16, v6e-32, v6e-64, v6e-128 and v6e-256"
V5P = (
    "v5p-8, v5p-16, v5p-32, v5p-64, v5p-128, v5p-256, v5p-512, v5p-1024, v5p-2048, v5p-4096, "
    "v5p-8192 and v5p-12288"
)
GENERATIONS = (
    "the generations are v2, v3, v4, v5e, v5p, v6e and 7x, as in v6e-8 or 2xv6e-16"
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v6e-7",
            'there is no TPU slice "v6e-7"; the nearest are v6e-4 and v6e-8. The number counts '
            f"chips, and v6e comes as {V6E}",
        ),
        (
            "2xv6e-512",
            'there is no TPU slice "2xv6e-512"; the nearest is v6e-256. The number counts '
            f"chips, and v6e comes as {V6E}",
        ),
        (
            "v5p-4",
            'there is no TPU slice "v5p-4"; the nearest is v5p-8. The number counts TensorCores, '
            f"two a chip, and v5p comes as {V5P}",
        ),
        (
            "v6-8",
            'there is no TPU slice "v6-8"; did you mean v6e-8, v4-8 or v3-8? ' + GENERATIONS,
        ),
        ("v6e8", '"v6e8" is no TPU slice; did you mean v6e-8, v6e-128 or v6e-4? ' + GENERATIONS),
        ("h100", '"h100" is no TPU slice; ' + GENERATIONS),
        ("0xv6e-8", '"0xv6e-8" is no TPU slice; the number of slices is 1 or more'),
    ],
)
def test_a_slice_that_does_not_exist_is_refused_with_the_nearest(name, message):
    with pytest.raises(UserError) as refused:
        slices.find(name)
    assert str(refused.value) == message


def test_a_size_names_as_many_cores_or_chips_as_its_topology_has():
    for one in slices.every():
        size = int(one.name.rpartition("-")[2])
        chips_there = math.prod(int(part) for part in one.topology.split("x"))
        per_chip = 1 if one.generation in ("v5e", "v6e") else 2
        assert size == chips_there * per_chip, one.name


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        # MaxText's table of what the compiler is told.
        ("v5e-8", (False, False)),
        ("v6e-64", (False, False)),
        ("v6e-128", (False, True)),
        ("v5e-256", (True, True)),
        ("v5p-64", (False, False, False)),
        ("v5p-128", (True, True, True)),
        ("v5p-12288", (True, True, True)),
        ("7x-8", (False, False, False)),
    ],
)
def test_a_side_of_a_slice_closes_where_google_joins_its_ends(name, rings):
    assert slices.find(name).each.rings == rings
