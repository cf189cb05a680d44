"""Files in 4 bits as others write them: what they mean, and what is refused of them."""

import json
from typing import Any

import numpy as np
import pytest

from tests.hub import four_bit_files as files
from windlass.errors import UserError
from windlass.hub import quantized

WORDS = {"uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32"}
STATE = "m.weight.quant_state.bitsandbytes__nf4"


class Stored:
    """A tensor as a file has it."""

    def __init__(self, value: np.ndarray):
        self.value, self.shape, self.type = value, value.shape, WORDS[value.dtype.name]

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.value[index]


def matrix() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(20, 256)).astype(np.float32)


def nf4(nested: bool = True) -> dict[str, np.ndarray]:
    return files.normal_float("m.weight", matrix(), nested=nested)[0]


def int4(symmetric: bool = False) -> dict[str, np.ndarray]:
    return files.integers("m", matrix(), 128, symmetric=symmetric)[0]


def joined(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    return quantized.joined({name: Stored(x) for name, x in tensors.items()}, "the files")


def test_several_tensors_are_one_matrix_and_the_others_stay():
    other = {"m.bias": np.zeros(20, np.float32)}
    for nested in (False, True):
        tensors, expected = files.normal_float("m.weight", matrix(), nested=nested)
        found = joined(tensors | other)
        assert sorted(found) == ["m.bias", "m.weight"] and found["m.weight"].shape == (20, 256)
        assert np.array_equal(found["m.weight"][3:5, 7:], expected[3:5, 7:])
    for symmetric in (False, True):
        tensors, expected = files.integers("m", matrix(), 128, symmetric=symmetric)
        assert np.array_equal(joined(tensors)["m.weight"][:], expected)


def state(**changes: Any) -> np.ndarray:
    held = json.loads(nf4()[STATE].tobytes()) | changes
    return np.frombuffer(json.dumps(held).encode(), np.uint8)


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        (nf4() | {STATE: np.zeros(3, np.uint8)}, "has a quant_state that is no JSON"),
        (
            nf4() | {STATE: state(quant_type="fp4")},
            'is of "fp4"; nf4 with its own table is read',
        ),
        (nf4() | {STATE: state(shape=[20])}, "has the shape [20]; a matrix has two sizes"),
        (
            nf4() | {STATE: state(blocksize=96)},
            "has blocks of 96, which do not divide its 256 inputs",
        ),
        (
            nf4() | {"m.weight": np.zeros((7, 1), np.uint8)},
            "is [7, 1] bytes; [20, 256] codes are half as many",
        ),
        (
            nf4() | {"m.weight.absmax": np.zeros(7, np.uint8)},
            "has [7] scales for 80 blocks",
        ),
        (
            nf4() | {"m.weight.nested_absmax": np.zeros(7, np.float32)},
            "has scales whose own scales are not those of double quantisation",
        ),
        (
            {name: x for name, x in nf4().items() if not name.endswith("weight.quant_map")},
            "has no quant_map beside its codes",
        ),
        (
            int4() | {"m.weight_g_idx": np.zeros(256, np.int32)},
            "has weight_g_idx: groups of inputs that do not lie together are not read",
        ),
        (
            int4() | {"m.weight_shape": np.array([20, 250])},
            "has the shape [20, 250]; two sizes are read, the last in eights",
        ),
        (
            int4() | {"m.weight_packed": np.zeros((20, 31), np.int32)},
            "is [20, 31] words, and [20, 256] weights",
        ),
        (
            int4() | {"m.weight_scale": np.zeros((20, 0), np.float32)},
            "has scales of [20, 0] for [20, 256] weights",
        ),
        (
            int4() | {"m.weight_zero_point": np.zeros((20, 2), np.int32)},
            "has zero points of [20, 2] for scales of [20, 2]",
        ),
    ],
)
def test_files_that_are_not_of_their_format_are_refused(tensors, wrong):
    with pytest.raises(UserError) as refusal:
        joined(tensors)
    assert str(refusal.value) == f"1 problem in the files:\n  m.weight  {wrong}"


def weights(**changes: Any) -> dict[str, Any]:
    about = files.compressed_tensors(128, symmetric=True)
    about["config_groups"]["group_0"]["weights"] |= changes
    return about


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        (
            files.BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"},
            ("bnb_4bit_quant_type", 'is "fp4"; "nf4" is read'),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "nf4"},
            ("load_in_4bit", "is null; true is read"),
        ),
        (
            weights() | {"format": "naive-quantized"},
            ("format", 'is "naive-quantized"; "pack-quantized" is read'),
        ),
        (weights(num_bits=8), ("config_groups.group_0.weights.num_bits", "is 8; 4 is read")),
        (
            weights(group_size=None),
            (
                "config_groups.group_0.weights.group_size",
                "is null; groups are of a multiple of 8 inputs",
            ),
        ),
        (
            weights(actorder="group"),
            (
                "config_groups.group_0.weights.actorder",
                'is "group"; null, false, "static" or "weight" is read',
            ),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            ("config_groups", "has 0; one group of linear maps is read"),
        ),
    ],
)
def test_settings_that_cannot_be_read_are_refused(about, problem):
    key, what = problem
    assert quantized.read({"quantization_config": about})[1] == [
        (f"quantization_config.{key}", what)
    ]
