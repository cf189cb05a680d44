"""Blocks of GGUF: bit-equal to what the `gguf` package writes and reads."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.quantization.blocks import FORMATS, nearest_inverse, to_float16

ROWS = 64  # of [outputs, inputs]
rng = np.random.default_rng(0)


def type_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[FORMATS[name].gguf]


def written(matrix: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(matrix, type_of(name))


def read(data: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, type_of(name))


def packed(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """The bytes of codes [outputs, groups, size] and scales [outputs, groups, 1]."""
    half = np.ascontiguousarray(scales, np.float16).view(np.uint8)
    if name == "tq2_0":
        quarters = (codes + 1).astype(np.uint8).reshape(*codes.shape[:2], 2, 4, 32)
        shifted = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
        joined = np.bitwise_or.reduce(shifted, axis=-2).reshape(*codes.shape[:2], 64)
        data = np.concatenate([joined, half], axis=-1)
    else:
        magnitude = np.searchsorted([0, 1, 2, 3, 4, 6, 8, 12], np.abs(codes))
        index = codes + 8 if name == "q4_0" else magnitude + 8 * (codes < 0)
        low, high = np.split(index.astype(np.uint8), 2, axis=-1)
        exponent = (np.frexp(scales)[1] + 127).astype(np.uint8)
        scale = half if name == "q4_0" else exponent
        data = np.concatenate([scale, low | (high << 4)], axis=-1)
    return data.reshape(len(codes), -1)


def blocked(matrix: np.ndarray, name: str) -> jax.Array:
    """[groups, size, outputs] of a matrix [outputs, inputs]."""
    return jnp.asarray(matrix.T.reshape(-1, FORMATS[name].size, len(matrix)))


def rounded(matrix: np.ndarray, name: str) -> np.ndarray:
    found = jax.jit(FORMATS[name].rounded)(blocked(matrix, name))
    return np.asarray(found).reshape(matrix.T.shape).T


def normal(scale: float) -> np.ndarray:
    return (scale * rng.normal(size=(ROWS, 1024))).astype(np.float32)


def ties(name: str) -> np.ndarray:
    """Weights in the middle of two levels, or a bit beside it, and largest ones of both signs."""
    level = rng.integers(-16, 17, size=(ROWS, 1024)).astype(np.float32) / 2
    level[:, ::32] = rng.choice([-8, 8], size=(ROWS, 32))
    scale = rng.choice([0.013, 0.25, 1 / 3, 7.0], size=(ROWS, 1)).astype(np.float32)
    tied = level * scale
    return np.nextafter(tied, tied + rng.choice([-1, 0, 1], size=tied.shape), dtype=np.float32)


def below_powers_of_two() -> np.ndarray:
    """A largest weight of every exponent, at most 64 last bits below or above a power of two."""
    powers = 2.0 ** np.arange(-120, 125)[:, None]
    beside = np.concatenate([1 - np.arange(1, 65) * 2.0**-24, 1 + np.arange(64) * 2.0**-23])
    largest = (powers * beside).astype(np.float32).reshape(-1, 1)
    others = largest * rng.uniform(-1, 1, (len(largest), 31))
    return np.concatenate([largest, others], axis=1).astype(np.float32)


MADE = {
    "normal": lambda name: normal(0.03),
    "wide": lambda name: normal(1.0) * np.exp(2 * normal(1.0)),
    "tiny": lambda name: normal(1.0) * 10 ** rng.uniform(-36, -5, (ROWS, 1)).astype(np.float32),
    "huge": lambda name: normal(1.0) * 10 ** rng.uniform(1, 4, (ROWS, 1)).astype(np.float32),
    "zero": lambda name: np.where(rng.random((ROWS, 1024)) < 0.99, 0, normal(1.0)),
    "tied": ties,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_is_bit_equal_to_writing_and_reading_gguf(name, kind):
    matrix = MADE[kind](name).astype(np.float32)
    data = written(matrix, name)
    expected, found = read(data, name), rounded(matrix, name)
    np.testing.assert_array_equal(found, expected)
    # The file of a matrix that is on the grid is that matrix: its values, and where there is a
    # scale, which of nothing has a sign, its bytes.
    again = written(found, name)
    np.testing.assert_array_equal(read(again, name), found)
    groups = found.reshape(-1, FORMATS[name].size).any(1)
    old, new = (x.reshape(-1, FORMATS[name].bytes)[groups] for x in (data, again))
    assert groups.any() and (old == new).all()


@pytest.mark.parametrize("name", ["q4_0", "tq2_0"])
def test_a_scale_beyond_float16_is_infinite_as_in_gguf(name):
    matrix = normal(1e6)
    found = rounded(matrix, name)
    assert np.isinf(found).any()
    np.testing.assert_array_equal(found, read(written(matrix, name), name))


def test_the_exponent_of_mxfp4_is_that_of_a_logarithm_in_float32_beside_every_power_of_two():
    matrix = below_powers_of_two()
    np.testing.assert_array_equal(rounded(matrix, "mxfp4"), read(written(matrix, "mxfp4"), "mxfp4"))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_pack_into_the_bytes_of_gguf(name):
    matrix = normal(0.03)
    codes, scales = map(np.asarray, jax.jit(FORMATS[name].coded)(blocked(matrix, name)))
    data = packed(codes.transpose(2, 0, 1), scales.transpose(2, 0, 1), name)
    assert codes.shape == (1024 // FORMATS[name].size, FORMATS[name].size, ROWS)
    assert (data == written(matrix, name)).all()


@pytest.mark.parametrize("name", ["q4_0", "tq2_0"])
def test_any_scale_in_float16_is_kept_by_the_bytes(name):
    matrix, form = normal(0.03), FORMATS[name]
    scales = rng.normal(size=(1024 // form.size, 1, ROWS)).astype(np.float32) * 0.01
    blocks = blocked(matrix, name)
    codes, halves = map(np.asarray, jax.jit(form.coded)(blocks, scales))
    assert (halves == scales.astype(np.float16)).all()
    assert form.levels is not None
    nearest = np.rint(np.asarray(blocks) / halves).clip(form.levels.low, form.levels.high)
    assert (codes == nearest).all()
    data = packed(codes.transpose(2, 0, 1), halves.transpose(2, 0, 1), name)
    found = np.asarray(jax.jit(form.scaled)(blocks, scales)).transpose(2, 0, 1)
    assert (read(data, name) == found.reshape(ROWS, -1)).all()


def test_float16_is_rounded_to_under_jit_as_numpy_rounds():
    """Every number of float16, the middles between them, and their neighbours in float32."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    above = [np.float32(65520), np.float32(1e6), np.nextafter(np.float32(65520), np.float32(0))]
    x = np.concatenate([halves, middles, above]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    assert (np.asarray(jax.jit(to_float16)(x)) == expected).all()
    assert (expected != x).mean() > 0.5


@pytest.mark.parametrize("bits", [-2, -1, 0, 1, 2])
def test_an_inverse_is_the_nearest_on_chips_whose_division_is_not(bits):
    x = (np.exp(rng.uniform(-15, 10, 100_000)) * rng.choice([-1, 1], 100_000)).astype(np.float32)
    x = np.concatenate([x, 2.0 ** np.arange(-10, 10, dtype=np.float32)])
    near = ((1 / x).view(np.int32) + np.int32(bits)).view(np.float32)
    found = np.asarray(jax.jit(nearest_inverse)(x, near))
    assert (found[:100_000] == (1 / x)[:100_000]).all()
    assert bits or (found == 1 / x).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_rounding_is_straight_through(name):
    blocks = blocked(normal(0.03), name)
    form = FORMATS[name]
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(form.rounded(x) * jnp.cos(x))))(blocks)
    through = np.cos(blocks) - np.sin(blocks) * np.asarray(jax.jit(form.rounded)(blocks))
    np.testing.assert_allclose(gradient, through, rtol=1e-6)
