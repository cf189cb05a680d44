import pytest

from windlass.devices import chips
from windlass.devices.alignment import warnings

V5E, V6E = chips.find("TPU v5 lite"), chips.find("TPU v6 lite")


def test_a_padded_size_is_told_with_what_it_costs_and_the_nearest_that_is_not():
    sizes = {"data.length": 1000, "model.embed": 512, "model.mlp": 1030, "model.vocab": 1030}
    assert warnings(sizes, "tpu", V5E) == [
        "data.length is 1000, which a TPU v5e pads to 1024: 2.3% of what it computes there is "
        "padding; 1024 is the nearest multiple of 128",
        "model.mlp is 1030, which a TPU v5e pads to 1152: 10.6% of what it computes there is "
        "padding; 1024 is the nearest multiple of 128",
        # Not 1024, which is nearer: a vocabulary must not lose tokens.
        "model.vocab is 1030, which a TPU v5e pads to 1152: 10.6% of what it computes there is "
        "padding; 1152 is the nearest multiple of 128",
    ]


def test_padding_that_costs_next_to_nothing_is_not_told():
    assert warnings({"model.vocab": 50257, "model.mlp": 8100}, "tpu", V5E) == [
        "model.mlp is 8100, which a TPU v5e pads to 8192: 1.1% of what it computes there is "
        "padding; 8064 is the nearest multiple of 128"
    ]


def test_a_chip_with_larger_matrix_units_asks_for_larger_multiples():
    assert warnings({"model.embed": 384}, "tpu", V6E) == [
        "model.embed is 384, which a TPU v6e pads to 512: 25.0% of what it computes there is "
        "padding; 512 is the nearest multiple of 256"
    ]
    assert warnings({"model.embed": 384}, "tpu", V5E) == []
    assert warnings({"model.embed": 64}, "tpu", None) == [
        "model.embed is 64, which a TPU pads to 128: 50.0% of what it computes there is padding; "
        "128 is the nearest multiple of 128"
    ]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_nothing_is_said_where_it_hardly_matters(kind: str):
    assert warnings({"data.length": 1000}, kind, None) == []
