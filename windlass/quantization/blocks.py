"""Blocks of GGUF: the numbers that a file of llama.cpp's can hold, computed as it computes them.

A block is a group of consecutive inputs of one output, with a scale d and a code for each weight:

    Q4_0   32 weights   d in float16: m / −8, m the weight of largest magnitude   −8 .. 7
    MXFP4  32 weights   d a power of two                                          E2M1, 0 .. ±6
    TQ2_0  256 weights  d in float16: the largest magnitude                       −1, 0, 1

Codes are those of `gguf.quants.quantize`, to the last bit of its float32 arithmetic; the codes of
a matrix that is on the grid already are its own, so a file holds what was trained.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from windlass.quantization.levels import Levels, codes, quantized, straight_through

Quantized = tuple[Float[Array, "groups size ..."], Float[Array, "groups 1 ..."]]

# Of float16: the least normal number, the step below it, and the largest number.
LEAST_NORMAL, LEAST, LARGEST = 2.0**-14, 2.0**-24, 65504.0
MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # between the magnitudes of E2M1, doubled
STEPS = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0)  # from each magnitude to the next
ROUNDED_UP = (1, 1, 3, 6, 11, 22)  # what ⌊ln 2 · 2^j⌋ grows by at j = 1, 2, ..., 6


class BlockFormat(NamedTuple):
    """A GGUF type: weights in a block, its bytes, and codes and scales of blocks along axis 1."""

    gguf: str
    size: int
    bytes: int
    quantize: Callable[[Float[Array, "groups size ..."]], Quantized]
    levels: Levels | None  # whole multiples of a float16 scale, which may be any

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.size

    def rounded(self, blocks: Float[Array, "groups size ..."]) -> Float[Array, "groups size ..."]:
        """The numbers that the blocks of a file would hold, with a straight-through gradient."""
        found, scales = self.quantize(jax.lax.stop_gradient(blocks))
        return straight_through(blocks, found * scales)

    def scaled(
        self, blocks: Float[Array, "groups size ..."], scales: Float[Array, "groups 1 ..."]
    ) -> Float[Array, "groups size ..."]:
        """The same with given scales, rounded to float16, which have a gradient as in LSQ."""
        assert self.levels is not None
        gain = (self.size * self.levels.high) ** -0.5
        return quantized(blocks, _half(scales), self.levels, gain)

    def coded(
        self,
        blocks: Float[Array, "groups size ..."],
        scales: Float[Array, "groups 1 ..."] | None = None,
    ) -> Quantized:
        """Codes and scales, whose product the rounded weights are."""
        if scales is None:
            return self.quantize(blocks)
        assert self.levels is not None
        return codes(blocks, (half := to_float16(scales)), self.levels), half


def to_float16(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """float32 rounded to what float16 can hold, subnormals too, in float32 arithmetic alone.

    A compiler may leave out a conversion to float16 and back, and a TPU has no float16.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    last = (bits >> jnp.uint32(13)) & jnp.uint32(1)  # ties go to the even one
    nearest = (bits + jnp.uint32(0xFFF) + last) & jnp.uint32(0xFFFFE000)
    normal = jax.lax.bitcast_convert_type(nearest, jnp.float32)
    small = jnp.round(x / LEAST) * LEAST
    rounded = jnp.where(jnp.abs(x) < LEAST_NORMAL, small, normal)
    return jnp.where(jnp.abs(rounded) > LARGEST, jnp.sign(x) * jnp.inf, rounded)


def _half(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    return straight_through(scales, to_float16(jax.lax.stop_gradient(scales)))


def _q4_0(blocks: Float[Array, "groups size ..."]) -> Quantized:
    scales = _extreme(blocks) * -0.125
    # Clipping changes nothing; it keeps the product and the sum from becoming one operation with
    # one rounding, which would move ties.
    steps = jnp.clip(blocks * _inverse(scales), -16, 16)
    return jnp.clip(jnp.floor(steps + 8.5), 0, 15) - 8, to_float16(scales)


def _extreme(blocks: Float[Array, "groups size ..."]) -> Float[Array, "groups 1 ..."]:
    """The first number of largest magnitude of each block, with its sign."""
    top, bottom = (x(blocks, axis=1, keepdims=True) for x in (jnp.max, jnp.min))
    first = jnp.argmax(blocks, axis=1, keepdims=True) < jnp.argmin(blocks, axis=1, keepdims=True)
    return jnp.where((top > -bottom) | ((top == -bottom) & first), top, bottom)


def _inverse(scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / d, and 0 where d is 0 in float16 whatever it is multiplied with."""
    is_zero = jnp.abs(scales) < LEAST / 4
    divisor = jnp.where(is_zero, 1, scales)
    return jnp.where(is_zero, 0, nearest_inverse(divisor, 1 / divisor))


def nearest_inverse(x: Float[Array, "..."], near: Float[Array, "..."]) -> Float[Array, "..."]:
    """The float32 nearest to 1 / x, of one that is at most two last bits beside it.

    GPUs and TPUs do not round quotients to the nearest. With M and R, the 24 bits of x and of its
    inverse, R is nearest to 2^47 / M where twice the remainder 2^47 − R M is at most M. That is
    small, and so exact modulo 2^32.
    """
    bits, inverse = (jax.lax.bitcast_convert_type(a, jnp.int32) for a in (x, near))
    divisor = (bits & 0x7FFFFF) | 0x800000
    quotient = (inverse & 0x7FFFFF) | 0x800000
    # Rounded up to the next power of two, which has one bit more.
    quotient = jnp.where((quotient == 0x800000) & (divisor < 0xC00000), 0x1000000, quotient)
    twice = -2 * quotient * divisor
    low = sum(((twice > odd * divisor).astype(jnp.int32) for odd in (1, 3)), 0)
    high = sum(((twice < -odd * divisor).astype(jnp.int32) for odd in (1, 3)), 0)
    return jax.lax.bitcast_convert_type(inverse + low - high, jnp.float32)


def _tq2_0(blocks: Float[Array, "groups size ..."]) -> Quantized:
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    is_whole = jnp.abs(blocks * _inverse(largest)) >= 0.5
    return jnp.where(is_whole, jnp.sign(blocks), 0), to_float16(largest)


def _mxfp4(blocks: Float[Array, "groups size ..."]) -> Quantized:
    magnitude = jnp.abs(blocks)
    exponent = _floor_log2(jnp.max(magnitude, axis=1, keepdims=True)) - 2
    # The numbers of E2M1 are doubled, so the scale is halved: 2^(exponent − 1), by its bits.
    scale = jax.lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
    scale = jnp.where(exponent < -125, 0, scale)
    above = [
        jnp.where(magnitude > middle * scale, step, 0.0)
        for middle, step in zip(MIDDLES, STEPS, strict=True)
    ]
    return jnp.sign(blocks) * sum(above[1:], above[0]), scale


def _floor_log2(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """⌊log2 x⌋ of a log2 that is rounded to float32, as NumPy and C have it.

    Just below a power of two, 2^K (1 − n 2^−24), the logarithm is K − n 2^−24 / ln 2. It is rounded
    to K where that is at most half of float32's spacing below K, 2^(j−24) with j = ⌊log2 |K|⌋ (of
    K − 1 above 0): where n ≤ ln 2 · 2^j.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    power = (bits >> 23) - 126  # K: of the power of two above
    missing = (1 << 23) - (bits & 0x7FFFFF)  # n
    size = jnp.where(power > 0, power - 1, -power)
    near = sum((jnp.where(size >= 2**j, grown, 0) for j, grown in enumerate(ROUNDED_UP, 1)), 0)
    return jnp.where(missing <= near, power, power - 1)


FORMATS = {
    "q4_0": BlockFormat("Q4_0", 32, 18, _q4_0, Levels(-8, 7)),
    "mxfp4": BlockFormat("MXFP4", 32, 17, _mxfp4, None),
    "tq2_0": BlockFormat("TQ2_0", 256, 66, _tq2_0, Levels(-1, 1, margin=0.5)),
}
