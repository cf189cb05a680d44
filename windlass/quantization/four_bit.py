"""Four bits a weight: codes, two in a byte, and a scale for each group of consecutive inputs.

    nf4     Ŵ = s t[c]      t the quantiles of a normal distribution that NormalFloat has
    int4    Ŵ = s (c − z)   z = 8, or a zero point for each group

Groups lie along one axis, as does the pair of codes in a byte: the first is the low half.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

Kind = Literal["int4", "nf4"]

# Of QLoRA (https://arxiv.org/abs/2305.14314), as float32 has them.
NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MIDDLE = 8  # the code of 0 in int4, where there are no zero points
LARGEST = 7  # of c − z there, above 0
# Steps that are tried for a group, as its largest magnitude over these: a smaller step cuts off the
# largest weights, and rounds the others better.
DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0, 10.5)


class FourBitArrays(NamedTuple):
    """Arrays that stand for a matrix; sizes differ from its own along one axis alone."""

    codes: UInt8[Array, "..."]  # half as long
    scales: Float[Array, "..."]  # one for each group
    zeros: UInt8[Array, "..."] | None = None  # zero points; None: the middle, or a table has none


def quantized(
    weight: Float[Array, "..."], kind: Kind, size: int, axis: int, dtype: DTypeLike = jnp.float32
) -> FourBitArrays:
    """The nearest codes of a matrix in groups of `size` along an axis, which divides it.

    They are the nearest with the scales of the given dtype, which are what is stored.
    """
    shape = weight.shape
    groups = weight.reshape(*shape[:axis], -1, size, *shape[axis + 1 :]).astype(jnp.float32)
    largest = jnp.max(jnp.abs(groups), axis=axis + 1, keepdims=True)
    if kind == "nf4":
        scales = _rounded_to(dtype, largest)
        codes = _nearest(groups, scales)
    else:
        scales, codes = _best_steps(groups, largest, axis + 1, dtype)
    scales = jnp.squeeze(scales, axis + 1).astype(dtype)
    return FourBitArrays(packed(codes.reshape(shape), axis), scales)


def dequantized(arrays: FourBitArrays, kind: Kind, axis: int) -> Float[Array, "..."]:
    """Ŵ in float32, laid out over the mesh as its scales are."""
    codes, scales, zeros = arrays
    shape, count = codes.shape, scales.shape[axis]
    in_groups = (*shape[:axis], count, shape[axis] // count, 1, *shape[axis + 1 :])
    wide = (axis + 1, axis + 2)  # the axes of a group: its bytes, and the halves of each
    both = _halves(_reshaped(codes, in_groups, _placed(codes, wide)), axis + 2)
    levels = _levels(both, kind, None if zeros is None else jnp.expand_dims(zeros, wide))
    matrix = levels * jnp.expand_dims(scales.astype(jnp.float32), wide)
    whole = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
    return _reshaped(matrix, whole, _placed(codes))


def packed(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Bytes of codes below 16, of which neighbours along an axis share one."""
    shape = codes.shape
    pairs = codes.reshape(*shape[:axis], -1, 2, *shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << jnp.uint8(4))


def _halves(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Both codes of each byte, along an axis of size 1."""
    shifts = jnp.array([0, 4], jnp.uint8).reshape(2, *[1] * (codes.ndim - axis - 1))
    return (codes >> shifts) & jnp.uint8(15)


def _levels(codes: UInt8[Array, "..."], kind: Kind, zeros: Array | None) -> Float[Array, "..."]:
    if kind == "nf4":
        return looked_up(jnp.array(NORMAL_FLOAT, jnp.float32), codes)
    middle = jnp.float32(MIDDLE) if zeros is None else zeros.astype(jnp.float32)
    return codes.astype(jnp.float32) - middle


def looked_up(table: Float[Array, " levels"], codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """The table's value at each code, by selects on its bits.

    These are fused with what follows, where a gather has its result in memory; and the gradient of
    a table that is learned is a few sums, and nothing is scattered.
    """
    bits = (len(table) - 1).bit_length()
    values = [table[i] for i in range(len(table))]
    values += values[-1:] * (2**bits - len(values))
    for bit in range(bits):
        is_odd = (codes >> jnp.uint8(bit)) & jnp.uint8(1) != 0
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [jnp.where(is_odd, odd, even) for even, odd in pairs]
    (value,) = values
    return value


def _nearest(groups: Float[Array, "..."], largest: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Codes of NormalFloat, by comparisons alone: a quotient's last bit differs between chips."""
    borders = [(a + b) / 2 for a, b in zip(NORMAL_FLOAT[:-1], NORMAL_FLOAT[1:], strict=True)]
    above = [(groups > border * largest).astype(jnp.uint8) for border in borders]
    return sum(above[1:], above[0])


def _best_steps(
    groups: Float[Array, "..."], largest: Float[Array, "..."], axis: int, dtype: DTypeLike
) -> tuple[Float[Array, "..."], UInt8[Array, "..."]]:
    """The step of each group, of those tried, with the least squared error; and the codes."""
    best, least = jnp.zeros_like(largest), jnp.full_like(largest, jnp.inf)
    for divisor in DIVISORS:
        step = _rounded_to(dtype, largest / divisor)
        error = (_rounded(groups, step) * step - groups) ** 2
        total = jnp.sum(error, axis=axis, keepdims=True)
        best, least = jnp.where(total < least, step, best), jnp.minimum(total, least)
    return best, (_rounded(groups, best) + MIDDLE).astype(jnp.uint8)


def _rounded_to(dtype: DTypeLike, scales: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scales in float32 that a dtype has; a compiler may leave out a cast there and back."""
    found = jnp.finfo(dtype)
    return jax.lax.reduce_precision(scales, found.nexp, found.nmant)


def _rounded(groups: Float[Array, "..."], step: Float[Array, "..."]) -> Float[Array, "..."]:
    steps = jnp.round(groups / jnp.where(step == 0, 1, step))
    return jnp.clip(steps, -MIDDLE, LARGEST)


def _placed(x: Array, new: tuple[int, ...] = ()) -> jax.sharding.PartitionSpec | None:
    """Partition spec of an array, with axes that are not split at these places."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_auto:
        return None
    spec = [*jax.typeof(x).sharding.spec]
    for axis in new:
        spec.insert(axis, None)
    return jax.sharding.PartitionSpec(*spec)


def _reshaped(x: Array, shape: tuple[int, ...], place: jax.sharding.PartitionSpec | None) -> Array:
    return jnp.reshape(x, shape, out_sharding=place)
