from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from windlass.checkpoint.fingerprint import _compiled, fingerprints, measure

DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32"]


def bits_of(dtype: str, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, (8, 6, 4), np.uint8)
    return raw % 2 == 0 if dtype == "bool" else raw.repeat(4, -1).view(jnp.dtype(dtype))


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2)])
def test_a_fingerprint_does_not_depend_on_the_mesh(place, shape):
    assert measure(place(3, shape)) == measure(place(3))


def test_a_fingerprint_is_the_same_inside_jit_and_under_a_mesh(place):
    state = place(3, (2, 2, 2))
    with jax.set_mesh(state.step.sharding.mesh):
        inside = jax.jit(fingerprints)(state)
    assert {name: int(value) for name, value in inside.items()} == measure(state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_the_fingerprint(dtype):
    array = bits_of(dtype)
    before = measure({"x": jnp.asarray(array)})
    random = np.random.default_rng(1)
    for _ in range(40):
        flipped = array.copy()
        byte = random.integers(flipped.nbytes)
        bit = 1 if dtype == "bool" else 1 << random.integers(8)
        flipped.view(np.uint8).reshape(-1)[byte] ^= np.uint8(bit)
        assert measure({"x": jnp.asarray(flipped)}) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanging_two_elements_changes_the_fingerprint(dtype):
    array = bits_of(dtype)
    before = measure({"x": jnp.asarray(array)})
    flat = array.reshape(-1).copy()
    other = next(i for i in range(1, flat.size) if flat[i].tobytes() != flat[0].tobytes())
    flat[[0, other]] = flat[[other, 0]]
    assert measure({"x": jnp.asarray(flat.reshape(array.shape))}) != before


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "complex64"])
def test_unusual_dtypes_have_fingerprints_too(dtype):
    numbers = np.arange(8).reshape(2, 4)
    one = jnp.asarray(numbers).astype(dtype)
    other = jnp.asarray(np.where(numbers == 5, 6, numbers)).astype(dtype)
    assert measure({"x": one}) == measure({"x": jnp.array(one)})
    assert measure({"x": one}) != measure({"x": other})


def test_scalars_and_empty_arrays_have_fingerprints():
    assert measure({"a": jnp.float32(1), "b": jnp.float32(2)}).keys() == {"a", "b"}
    assert measure(jnp.float32(1)) != measure(jnp.float32(2))
    assert measure({"none": None, "empty": jnp.zeros((0, 3))}) == {"empty": 0}
    assert measure({}) == {}


def test_fingerprints_of_one_kind_of_array_are_compiled_once(place):
    measure(place(0, (2, 2, 2)))
    compiled: Any = _compiled
    before = compiled._cache_size()
    measure(place(1, (2, 2, 2)))
    assert compiled._cache_size() == before


def test_a_leaf_that_is_no_array_of_numbers_is_refused():
    with pytest.raises(ValueError, match="rate is 0.1; only arrays of numbers are stored"):
        measure({"rate": 0.1})
    with pytest.raises(ValueError, match="only arrays of numbers are stored, keys as data"):
        measure({"key": jax.random.key(0)})


def test_a_sharded_array_is_not_gathered_for_its_fingerprint():
    mesh = jax.make_mesh((8,), ("fsdp",))
    whole = jax.ShapeDtypeStruct(
        (4096, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    text = jax.jit(fingerprints).lower({"x": whole}).compile().as_text()
    assert text and "all-gather" not in text and "4096" not in text.split("ENTRY")[1]
