"""Four-bit matrices: the nearest codes, two in a byte, and the same numbers back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.quantization import four_bit
from windlass.quantization.four_bit import NORMAL_FLOAT, FourBitArrays, dequantized, quantized


def matrix(shape: tuple[int, ...] = (3, 64, 5)) -> jax.Array:
    return 0.02 * jax.random.normal(jax.random.key(0), shape)


def codes_of(arrays: FourBitArrays, axis: int) -> np.ndarray:
    """The codes of bytes, by NumPy."""
    both = np.stack([np.asarray(arrays.codes) & 15, np.asarray(arrays.codes) >> 4], axis + 1)
    shape = [*arrays.codes.shape]
    shape[axis] *= 2
    return both.reshape(shape)


def test_nf4_has_the_nearest_of_its_values_in_every_group():
    weight = matrix()
    arrays = quantized(weight, "nf4", 16, 1)
    assert arrays.codes.shape == (3, 32, 5) and arrays.scales.shape == (3, 4, 5)
    groups = np.asarray(weight).reshape(3, 4, 16, 5)
    largest = np.abs(groups).max(2, keepdims=True)
    apart = np.abs(groups[..., None] / largest[..., None] - np.array(NORMAL_FLOAT, np.float32))
    codes = codes_of(arrays, 1)
    assert np.array_equal(codes, apart.argmin(-1).reshape(codes.shape))
    expected = np.array(NORMAL_FLOAT, np.float32)[codes].reshape(groups.shape) * largest
    assert np.array_equal(dequantized(arrays, "nf4", 1), expected.reshape(weight.shape))


def test_scales_of_bfloat16_lose_nothing_of_nf4_where_weights_are_bfloat16():
    weight = matrix().astype(jnp.bfloat16)
    found, exact = (quantized(weight, "nf4", 16, 1, dtype) for dtype in ("bfloat16", "float32"))
    assert found.scales.dtype == jnp.bfloat16
    assert np.array_equal(dequantized(found, "nf4", 1), dequantized(exact, "nf4", 1))


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_codes_are_the_nearest_with_the_scales_that_are_stored(kind):
    weight = matrix()
    arrays = quantized(weight, kind, 16, 1, jnp.bfloat16)
    levels = np.array(NORMAL_FLOAT if kind == "nf4" else range(-8, 8), np.float32)
    groups = np.asarray(weight).reshape(3, 4, 16, 5)
    scales = np.asarray(arrays.scales.astype(jnp.float32))[:, :, None]
    apart = np.abs(groups[..., None] - scales[..., None] * levels)
    expected = (scales[..., None] * levels + 0 * apart)[*np.indices(groups.shape), apart.argmin(-1)]
    found = np.asarray(dequantized(arrays, kind, 1)).reshape(groups.shape)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_what_is_on_the_levels_already_stays_as_it_is(kind):
    arrays = quantized(matrix(), kind, 32, 1)
    once = dequantized(arrays, kind, 1)
    twice = dequantized(quantized(once, kind, 32, 1), kind, 1)
    assert np.allclose(once, twice, rtol=0, atol=1e-7)


def test_int4_has_less_error_than_a_step_by_which_nothing_is_cut_off():
    weight = matrix((128, 8))
    arrays = quantized(weight, "int4", 128, 0)
    largest = np.abs(weight).max(0, keepdims=True)
    whole = np.round(weight / (largest / 7)) * (largest / 7)
    found = np.square(dequantized(arrays, "int4", 0) - weight).sum()
    assert found < 0.9 * np.square(whole - weight).sum()


def test_a_group_of_zeros_is_zero():
    for kind in ("nf4", "int4"):
        found = dequantized(quantized(jnp.zeros((16, 2)), kind, 16, 0), kind, 0)
        assert not np.asarray(found).any()


def test_zero_points_move_the_levels():
    codes = four_bit.packed(jnp.arange(16, dtype=jnp.uint8).reshape(16, 1), 0)
    arrays = FourBitArrays(codes, jnp.full((2, 1), 0.5), jnp.array([[3], [12]], jnp.uint8))
    expected = 0.5 * (np.arange(16) - np.repeat([3, 12], 8))
    assert np.array_equal(np.ravel(dequantized(arrays, "int4", 0)), expected)
