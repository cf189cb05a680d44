"""The choice of devices, from invented inventories."""

import os

import pytest

from windlass.config import read
from windlass.devices.selection import Device, choose, devices, enough_threads, present
from windlass.errors import UserError

CPU = {"cpu": ["cpu"]}
TPU = {"tpu": ["TPU v5 lite"] * 8, "cpu": ["cpu"]}
GPU = {"gpu": ["NVIDIA H200"] * 2, "cpu": ["cpu"]}
BUSY = {"tpu": "it is busy"}
BOTH = {"tpu": ["TPU v6 lite"], "gpu": ["Tesla T4", "NVIDIA L4"], "cpu": ["cpu"]}


def refused(*args) -> str:
    with pytest.raises(UserError) as refusal:
        choose(*args)
    return str(refusal.value)


@pytest.mark.parametrize(
    "inventory, kind, count, note",
    [
        (TPU, "tpu", 8, "device auto: using 8 TPUs (TPU v5 lite)"),
        (BOTH, "tpu", 1, "device auto: using 1 TPU (TPU v6 lite)"),
        (GPU, "gpu", 2, "device auto: no TPU is present, using 2 GPUs (NVIDIA H200)"),
        (CPU, "cpu", 1, "device auto: no TPU or GPU is present, using 1 CPU"),
        ({"tpu": [], **CPU}, "cpu", 1, "device auto: no TPU or GPU is present, using 1 CPU"),
    ],
)
def test_auto_takes_the_best_that_is_present_and_says_so(inventory, kind, count, note):
    chosen = choose(Device(), inventory, {})
    assert (chosen.kind, chosen.count, chosen.requested) == (kind, count, "auto")
    assert (chosen.notes, chosen.warnings) == ([note], [])


def test_a_device_that_is_present_is_taken_without_a_word():
    assert choose(Device(kind="cpu"), BOTH, {}) == ("cpu", 1, "cpu", [], [])
    assert choose(Device(kind="gpu"), BOTH, {}) == ("gpu", 2, "gpu", [], [])


def test_a_device_that_is_absent_is_refused():
    assert refused(Device(kind="tpu"), GPU, {}) == (
        "device.kind is tpu, and no TPU is present, only 2 GPUs (NVIDIA H200) and 1 CPU; "
        "device=gpu, device=cpu or device=auto would run here, "
        "and device.fallback=true goes on with the best there is"
    )


def test_fallback_warns_and_goes_on():
    chosen = choose(Device(kind="tpu", fallback=True), GPU, {})
    assert (chosen.kind, chosen.count, chosen.requested) == ("gpu", 2, "tpu")
    assert chosen.warnings == [
        "device.kind is tpu, and no TPU is present: going on with 2 GPUs (NVIDIA H200), "
        "because device.fallback is true"
    ]


def test_a_tpu_that_does_not_answer_is_refused_unless_another_device_is_requested():
    assert refused(Device(), CPU, {}, BUSY) == (
        "a TPU is here and does not answer: it is busy; device=cpu runs without it, and "
        "device.fallback=true goes on with the best there is"
    )
    for device, environ in ((Device(kind="tpu"), {}), (Device(), {"PJRT_DEVICE": "TPU"})):
        assert refused(device, GPU, environ, BUSY).startswith("a TPU is here and does not")
    assert choose(Device(kind="cpu"), CPU, {}, BUSY) == ("cpu", 1, "cpu", [], [])
    assert choose(Device(), CPU, {"PJRT_DEVICE": "CPU"}, BUSY).kind == "cpu"
    chosen = choose(Device(fallback=True), CPU, {}, BUSY)
    assert (chosen.kind, chosen.warnings) == (
        "cpu",
        [
            "a TPU is here and does not answer: it is busy: going on with 1 CPU, because "
            "device.fallback is true"
        ],
    )


def test_a_gpu_that_does_not_answer_counts_where_nothing_better_is_present():
    failing = {"gpu": "its driver is too old"}
    assert refused(Device(), CPU, {}, failing).startswith(
        "a GPU is here and does not answer: its driver is too old; device=cpu runs without it"
    )
    assert choose(Device(), TPU, {}, failing).kind == "tpu"
    assert refused(Device(kind="gpu"), TPU, {}, failing).startswith("a GPU is here and does not")


def test_where_nothing_works_the_reason_is_given_even_with_fallback():
    assert refused(Device(fallback=True), {}, {}, BUSY) == (
        "a TPU is here and does not answer: it is busy; no other device is present"
    )


def test_nothing_present_is_refused():
    assert refused(Device(), {}, {}) == "no device is present: JAX finds no TPU, GPU or CPU"


def test_count_limits_how_many_are_used():
    assert choose(Device(kind="tpu", count=4), TPU, {}).count == 4
    assert choose(Device(count=8), TPU, {}).count == 8


def test_more_than_there_are_is_refused_or_with_fallback_cut():
    assert refused(Device(kind="tpu", count=16), TPU, {}) == (
        "device.count is 16, with 8 TPUs (TPU v5 lite) present: 1 to 8 would do, "
        "or device.fallback=true to use what there is"
    )
    assert refused(Device(count=2), CPU, {}) == (
        "device.count is 2, with 1 CPU present: 1 would do, "
        "or device.fallback=true to use what there is"
    )
    chosen = choose(Device(kind="tpu", count=4, fallback=True), CPU, {})
    assert (chosen.kind, chosen.count) == ("cpu", 1)
    assert chosen.warnings == [
        "device.kind is tpu, and no TPU is present: going on with 1 CPU, "
        "because device.fallback is true",
        "device.count is 4, with 1 CPU present: using 1, because device.fallback is true",
    ]


@pytest.mark.parametrize(
    "name, kind", [("TPU", "tpu"), ("CUDA", "gpu"), ("GPU", "gpu"), ("cpu", "cpu")]
)
def test_pjrt_device_names_the_kind_where_the_recipe_leaves_it_open(name, kind):
    assert choose(Device(), BOTH, {"PJRT_DEVICE": name}).kind == kind
    assert choose(Device(kind="gpu"), BOTH, {"PJRT_DEVICE": name}).kind == "gpu"


def test_pjrt_device_is_as_strict_as_the_recipe():
    assert refused(Device(), CPU, {"PJRT_DEVICE": "TPU"}) == (
        "PJRT_DEVICE is TPU, and no TPU is present, only 1 CPU; "
        "device=cpu or device=auto would run here, "
        "and device.fallback=true goes on with the best there is"
    )
    assert refused(Device(), CPU, {"PJRT_DEVICE": "NEURON"}) == (
        'PJRT_DEVICE is "NEURON"; it must be TPU, CUDA, GPU or CPU'
    )


def test_tpu_num_devices_is_the_count_where_the_recipe_gives_none():
    assert choose(Device(), TPU, {"TPU_NUM_DEVICES": "4"}).count == 4
    assert choose(Device(count=2), TPU, {"TPU_NUM_DEVICES": "4"}).count == 2
    assert choose(Device(), GPU, {"TPU_NUM_DEVICES": "1"}).count == 2
    assert refused(Device(), TPU, {"TPU_NUM_DEVICES": "16"}) == (
        "TPU_NUM_DEVICES is 16, with 8 TPUs (TPU v5 lite) present: 1 to 8 would do, "
        "or device.fallback=true to use what there is"
    )
    for text in ("many", "0", "-1"):
        assert refused(Device(), TPU, {"TPU_NUM_DEVICES": text}) == (
            f'TPU_NUM_DEVICES is "{text}"; it must be a whole number, 1 or more'
        )


def test_a_count_is_one_or_more():
    with pytest.raises(UserError) as refusal:
        read(Device, {"count": 0})
    assert str(refusal.value) == (
        "1 problem in the recipe:\n  count  is 0; it must be 1 or more, or null for all"
    )


@pytest.mark.parametrize(
    ("flags", "cores", "before", "after"),
    [
        ("--xla_dump_to=x --xla_force_host_platform_device_count=8", 2, None, "32"),
        ("--xla_force_host_platform_device_count=8", 2, "3", "3"),
        ("--xla_force_host_platform_device_count=8", 64, None, None),  # it has one for each core
        ("--xla_force_host_platform_device_count=1", 2, None, None),
        ("--xla_dump_to=x", 2, None, None),
    ],
)
def test_simulated_devices_have_threads_to_wait_in(flags, cores, before, after, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("PJRT_NPROC", before or "")
    if before is None:
        monkeypatch.delenv("PJRT_NPROC")
    with enough_threads():
        assert os.environ.get("PJRT_NPROC") == after
    assert os.environ.get("PJRT_NPROC") == before


def test_the_devices_that_answer_are_the_ones_chosen():
    inventory = present()
    assert set(inventory["cpu"]) == {"cpu"}
    chosen = choose(Device(kind="cpu", count=1), inventory, {})
    (device,) = devices(chosen)
    assert device.platform == "cpu"
