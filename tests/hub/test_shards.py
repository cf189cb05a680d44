"""Files of tensors are those of the safetensors library, of the sizes that were told before."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from windlass.hub.shards import INDEX, ShardTensor, divided, index

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def tensor(name: str, value: np.ndarray) -> ShardTensor:
    return ShardTensor(name, value.shape, value.dtype, lambda: value)


@pytest.fixture
def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.integers(100, size=7).astype(np.int32),
        "ünï": rng.normal(size=(2, 3, 1)).astype(BFLOAT16),
        "none": np.zeros((0, 4), np.float16),
        "scalar": np.full((), 3.5, np.float32),
    }


def test_what_is_written_is_what_the_library_reads(values, tmp_path):
    told = []
    (shard,) = divided([tensor(*item) for item in values.items()], 10**9)
    shard.write(tmp_path, told.append)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size == shard.size
    assert told == [value.nbytes for value in values.values()]
    found = load_file(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value)
    with safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt"}  # which transformers asks for


def test_floats_are_cast_as_they_are_written_and_integers_are_not(values, tmp_path):
    (shard,) = divided([tensor(*item).typed("bfloat16") for item in values.items()], 10**9)
    shard.write(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: x.dtype.name for name, x in found.items() if x.dtype != BFLOAT16} == {
        "b": "int32"
    }
    assert np.array_equal(found["a.weight"], values["a.weight"].astype(BFLOAT16))


def test_no_file_is_larger_than_asked_unless_a_tensor_is_and_the_index_finds_each(tmp_path):
    sizes = {"a": 10, "b": 15, "c": 40, "d": 5, "e": 20, "f": 1}
    values = {name: np.full(size, size, np.uint8) for name, size in sizes.items()}
    shards = divided([tensor(*item) for item in values.items()], 25)
    assert [[one.name for one in shard.tensors] for shard in shards] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
        ["f"],
    ]
    for shard in shards:
        shard.write(tmp_path)
    (tmp_path / INDEX).write_text(index(shards))
    about = json.loads((tmp_path / INDEX).read_text())
    assert about["metadata"] == {"total_size": 91}
    assert sorted({*about["weight_map"].values()}) == [
        f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]
    for name, value in values.items():
        file = load_file(tmp_path / about["weight_map"][name])
        assert np.array_equal(file[name], value)
