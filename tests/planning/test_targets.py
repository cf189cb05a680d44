"""What a run can be planned for, by the names that people write."""

import jax
import pytest

from windlass.devices import slices
from windlass.errors import UserError
from windlass.planning import targets


@pytest.mark.parametrize(
    ("written", "name", "chip", "devices", "chips", "hosts"),
    [
        ("v5e-8", "v5e-8", "TPU v5e", 8, 8, 1),
        ("V5litepod-8", "v5e-8", "TPU v5e", 8, 8, 1),
        ("v3-8", "v3-8", "TPU v3", 8, 4, 1),
        ("v4-8", "v4-8", "TPU v4", 4, 4, 1),
        ("tpu7x-8", "7x-8", "TPU 7x", 8, 4, 1),
        ("2x7x-8", "2x7x-8", "TPU 7x", 16, 8, 2),
        ("2xv6e-16", "2xv6e-16", "TPU v6e", 32, 32, 8),
        ("8t", "8t", "TPU 8t", 1, 1, 1),
        ("TPU8i", "8i", "TPU 8i", 2, 1, 1),
        (" H100 ", "h100", "H100", 1, 1, 1),
        ("8xH200", "8xh200", "H200", 8, 8, 1),
        ("16 x h100", "16xh100", "H100", 16, 16, 2),
        ("H100:8", "8xh100", "H100", 8, 8, 1),
        ("2xt4", "2xt4", "T4", 2, 2, 1),
        ("a100", "a100-40gb", "A100 40GB", 1, 1, 1),
        ("A100-80GB", "a100-80gb", "A100 80GB", 1, 1, 1),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", "A100 80GB", 1, 1, 1),
        ("v100-32", "v100-32gb", "V100 32GB", 1, 1, 1),
        ("4090", "rtx-4090", "RTX 4090", 1, 1, 1),
        ("rtx pro 6000", "rtx-pro-6000", "RTX PRO 6000", 1, 1, 1),
        ("8xgb200", "8xgb200", "GB200", 8, 8, 2),
        ("cpu", "cpu", "CPU", 1, 1, 1),
        ("8xcpu", "8xcpu", "CPU", 8, 8, 1),
    ],
)
def test_a_target_is_found_by_the_names_that_people_write(
    written, name, chip, devices, chips, hosts
):
    found = targets.find(written)
    assert (found.name, found.chip.name) == (name, chip)
    assert (found.devices, found.chips, found.hosts) == (devices, chips, hosts)
    assert len(found.absent) == devices
    assert targets.find(found.name) == found


def test_every_slice_is_a_target_whose_devices_have_places_of_their_own():
    for one in slices.every():
        if one.chips > 64:
            continue
        absent = targets.find(one.name).absent
        assert len({(device.coords, device.core_on_chip) for device in absent}) == one.devices
        assert (
            tuple(max(place) + 1 for place in zip(*[d.coords for d in absent], strict=True))
            == (
                *one.sides,
                1,
            )[:3]
        )


def test_gpus_of_a_host_are_joined_by_links_and_gb200s_in_domains_of_72():
    assert [device.slice_index for device in targets.find("16xh100").absent] == [0] * 8 + [1] * 8
    assert {device.slice_index for device in targets.find("72xgb200").absent} == {0}


def test_this_machine_is_a_target():
    here = targets.find("here")
    assert here == targets.here()
    assert (here.chip.kind, here.devices) == ("cpu", len(jax.devices("cpu")))
    assert here.chip.memory_bytes > 2**28


def test_a_chip_of_which_no_slices_are_published_says_so():
    assert targets.find("8t").notes == ["no slices of TPU 8t are published: this is one chip alone"]
    assert targets.find("v5e-8").notes == []


def test_several_targets_are_each_there_once():
    assert [one.name for one in targets.several("v5e-8, a100,,v5litepod-8,A100-40gb")] == [
        "v5e-8",
        "a100-40gb",
    ]
    assert [one.name for one in targets.several(["h100", "2xh100"])] == ["h100", "2xh100"]


GPUS = (
    "GPUs are t4, v100-16gb, v100-32gb, l4, a100-40gb, a100-80gb, h100, h200, b200, gb200, "
    "rtx-4060, rtx-4090, rtx-5090 and rtx-pro-6000, as in h100 or 8xh100; TPU slices are of v2, "
    "v3, v4, v5e, v5p, v6e and 7x, as in v6e-8 or 2xv6e-16; and there are cpu and here"
)
V5E = "v5e-1, v5e-4, v5e-8, v5e-16, v5e-32, v5e-64, v5e-128 and v5e-256"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("h300", f'no chip is called "h300"; did you mean h200 or h100? {GPUS}'),
        ("abacus", f'no chip is called "abacus"; {GPUS}'),
        (
            "v5e-12,h100",
            'there is no TPU slice "v5e-12"; the nearest are v5e-8 and v5e-16. The number counts '
            f"chips, and v5e comes as {V5E}",
        ),
        (
            "8t-16",
            'there is no TPU slice "8t-16": none of TPU 8t is published. 8t is one chip alone, '
            "and slices are of v2, v3, v4, v5e, v5p, v6e and 7x",
        ),
        (
            "12xh100,0xcpu",
            '"12xh100" is no whole number of hosts, which have 8 GPUs each; 8xh100 or 16xh100 '
            'would do\n"0xcpu" has no CPU devices; 1 or more would do',
        ),
        ("8000000xh100", '"8000000xh100" is 8,000,000 devices; a plan has 100,000 at most'),
        (" ,", "on what? A TPU slice as v5e-8, GPUs as h100 or 8xh200, cpu, or here"),
    ],
)
def test_what_there_is_not_is_refused_with_the_nearest_and_all_at_once(names, message):
    with pytest.raises(UserError) as refusal:
        targets.several(names)
    assert str(refusal.value) == message
