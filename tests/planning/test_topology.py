"""How fast devices reach each other, against the rules of "How to scale your model"."""

import pytest

from windlass.devices.mesh import AXES
from windlass.planning import targets
from windlass.planning.topology import Reach, reaches


def along(name: str, sizes: tuple[int, int, int], *axes: str) -> Reach:
    split = dict(zip(AXES, sizes, strict=True))
    return reaches(targets.find(name), split).along(*axes)


@pytest.mark.parametrize(
    ("name", "sizes", "axis", "gigabytes", "wraps"),
    [
        # A link one way, for each side of the torus; twice that where the side is a ring.
        ("v5e-8", (1, 8, 1), "fsdp", 45 * 2, False),
        ("v5e-8", (2, 4, 1), "fsdp", 45, False),
        ("v5e-128", (1, 128, 1), "fsdp", 45 * 3, False),
        ("v5e-256", (1, 256, 1), "fsdp", 45 * 4, True),
        ("v6e-256", (16, 16, 1), "data", 90 * 2, True),
        ("v5p-64", (1, 32, 1), "fsdp", 90 * 3, False),
        ("v5p-128", (1, 64, 1), "fsdp", 90 * 6, True),
        ("v5p-128", (1, 16, 4), "tensor", 90 * 2, True),
        # Every other chip of a side: two such groups share its links.
        ("v5e-16", (2, 8, 1), "data", 45 / 2, False),
        # Along both cores of a chip, and where each core speaks for itself.
        ("7x-8", (1, 8, 1), "fsdp", 90 * 2, False),
        ("7x-8", (1, 4, 2), "fsdp", 90 * 2 / 2, False),
        ("8xh200", (1, 8, 1), "fsdp", 450, False),
        ("2xt4", (2, 1, 1), "data", 16, False),
    ],
)
def test_what_comes_into_a_device_goes_by_the_links_along_an_axis(
    name, sizes, axis, gigabytes, wraps
):
    found = along(name, sizes, axis)
    assert found.bandwidth == pytest.approx(gigabytes * 1e9)
    assert (found.wraps, found.groups) == (wraps, 1)
    assert found.ways == sizes[AXES.index(axis)]


def test_the_cores_of_a_chip_meet_in_its_memory():
    assert along("7x-8", (1, 4, 2), "tensor").bandwidth == 3690e9


def test_between_slices_and_between_hosts_goes_the_network():
    assert along("2xv6e-16", (2, 16, 1), "data")[:2] == (1, 2)
    assert along("2xv6e-16", (2, 16, 1), "data").network == 12.5e9
    assert along("2xv6e-16", (2, 16, 1), "data", "fsdp")[:2] == (16, 2)
    assert along("16xh100", (1, 16, 1), "fsdp") == Reach(8, 2, 450e9, False, 50e9)


def test_what_is_not_published_stays_unknown():
    assert along("8i", (1, 2, 1), "fsdp").bandwidth is None
    assert along("16xl4", (16, 1, 1), "data").network is None
