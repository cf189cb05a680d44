"""Options by which collectives run beside compute."""

import pytest

from windlass.devices import chips, overlap

V6E = chips.find("TPU v6 lite")
OURS = overlap.options(V6E, 8, {})


def test_a_v6e_slice_is_asked_to_gather_beside_other_work():
    assert OURS["xla_enable_async_all_gather"] is True
    assert all(OURS.values())


@pytest.mark.parametrize("name", ["TPU v5 lite", "TPU v5p", "NVIDIA H200", "cpu"])
def test_other_chips_are_asked_for_nothing(name: str):
    assert overlap.options(chips.find(name), 8, {}) == {}


def test_a_chip_alone_has_nothing_to_gather():
    assert overlap.options(V6E, 1, {}) == {}


@pytest.mark.parametrize("variable", ["LIBTPU_INIT_ARGS", "XLA_FLAGS"])
def test_a_flag_of_the_environment_wins(variable: str):
    given = {variable: "--xla_enable_async_all_gather=false --xla_other=1"}
    found = overlap.options(V6E, 8, given)
    assert set(OURS) - set(found) == {"xla_enable_async_all_gather"}
