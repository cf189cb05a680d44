"""Grouped matmul in kernels on NVIDIA GPUs: y = x W_e of rows that are sorted by expert.

XLA for GPUs multiplies every row with the matrices of all experts, and masks. Here each program has
a block of rows of one expert: with blocks of b rows, E experts have at most R / b + E of them,
however uneven they are. Its gradients are of the same kind: by x with the matrices transposed, and
by W_e the product x^T dy over the rows of e.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from windlass.devices.triton import called, dot

ROWS = 128  # of a block
WIDE, DEEP = 128, 64  # the most columns of a block, and of what it sums over at a time
LEAST = 16  # of any side of a matmul on Tensor Cores
WARPS, STAGES = 8, 3


def ragged_dot(
    x: Float[Array, "rows read"],
    weight: Float[Array, "experts read written"],
    sizes: Int[Array, " experts"],
) -> Float[Array, "rows written"]:
    """As `jax.lax.ragged_dot`, of 16 bits on NVIDIA GPUs."""
    y: Any = grouped_matmul(_padded(x, 1), _padded(weight, 1, 2), sizes)
    return y[:, : weight.shape[2]]


def _padded(x: Array, *axes: int) -> Array:
    """An array with zeros up to sizes that a matmul in kernels has."""
    more = [(0, -size % LEAST if axis in axes else 0) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, more) if any(after for _, after in more) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "rows read"],
    weight: Float[Array, "experts read written"],
    sizes: Int[Array, " experts"],
    interpret: bool = False,
) -> Float[Array, "rows written"]:
    """x W_e of the expert e of each row; zeros for rows beyond those of all experts."""
    return _forward(x, weight, sizes, interpret)[0]


def _forward(x: Array, weight: Array, sizes: Array, interpret: bool):
    like = jax.eval_shape(jax.lax.ragged_dot, x, weight, sizes)
    y = _product(x, weight, sizes, like, is_transposed=False, interpret=interpret)
    return y, (x, weight, sizes)


def _backward(interpret: bool, kept: tuple[Array, Array, Array], d: Array):
    x, weight, sizes = kept
    like = [jax.eval_shape(lambda one: one, one) for one in (x, weight)]
    of_x = _product(d, weight, sizes, like[0], is_transposed=True, interpret=interpret)
    return of_x, _sums(x, d, sizes, like[1], interpret=interpret), None


grouped_matmul.defvjp(_forward, _backward)


class RowBlocks(NamedTuple):
    """Blocks of rows of one expert each; rows beyond those of all experts are one more's."""

    expert: Int[Array, " blocks"]
    begin: Int[Array, " blocks"]  # first row
    end: Int[Array, " blocks"]  # of the expert's rows; blocks that there are none for begin there


def blocks(sizes: Int[Array, " experts"], rows: int) -> RowBlocks:
    sizes = jnp.append(sizes, rows - jnp.sum(sizes))
    counts, ends = -(-sizes // ROWS), jnp.cumsum(sizes)
    after = jnp.cumsum(counts)
    number = jnp.arange(-(-rows // ROWS) + len(sizes), dtype=sizes.dtype)
    found = jnp.searchsorted(after, number, side="right", method="compare_all")
    expert = jnp.minimum(found, len(sizes) - 1).astype(sizes.dtype)
    begin = (ends - sizes)[expert] + ROWS * (number - (after - counts)[expert])
    return RowBlocks(expert, jnp.minimum(begin, ends[expert]), ends[expert])


def _product(
    x: Array, weight: Array, sizes: Array, like: Any, *, is_transposed: bool, interpret: bool
) -> Array:
    """x W_e, or x W_e^T."""
    (rows, read), written, experts = x.shape, like.shape[1], len(weight)
    deep, wide = _side(read, DEEP), _side(written, WIDE)
    across = written // wide

    def expert_matmul(x, weight, expert, begin, end, y):
        from jax.experimental import pallas as pl

        number, column = pl.program_id(0) // across, pl.program_id(0) % across
        own, first, last = expert[number], begin[number], end[number]
        matrix = jnp.minimum(own, experts - 1)
        columns = pl.ds(column * wide, wide)
        is_row = first + jnp.arange(ROWS) < last

        def part(i, total):
            at = pl.ds(i * deep, deep)
            rows = _load(x.at[pl.ds(first, ROWS), at], is_row)
            if is_transposed:
                return total + dot(rows, weight[matrix, columns, at], over=(1, 1))
            return total + dot(rows, weight[matrix, at, columns])

        none = jnp.zeros((ROWS, wide), jnp.float32)
        steps = (own < experts).astype(jnp.int32) * (read // deep)
        total = jax.lax.fori_loop(0, steps, part, none)
        _store(y.at[pl.ds(first, ROWS), columns], total, is_row)

    own = blocks(sizes, rows)
    return called(
        expert_matmul,
        grid=(len(own.expert) * across,),
        out_shape=like,
        warps=WARPS,
        stages=STAGES,
        matmul=(rows, written, read),
        interpret=interpret,
    )(x, weight, *own)


def _sums(x: Array, d: Array, sizes: Array, like: Any, *, interpret: bool) -> Array:
    """x^T d over the rows of each expert."""
    experts, read, written = like.shape
    tall, wide = _side(read, ROWS), _side(written, WIDE)
    across, along = written // wide, read // tall

    def expert_gradient(x, d, begin, end, total):
        from jax.experimental import pallas as pl

        expert, place = pl.program_id(0) // (across * along), pl.program_id(0) % (across * along)
        features = pl.ds(place // across * tall, tall)
        columns = pl.ds(place % across * wide, wide)
        first, last = begin[expert], end[expert]

        def part(i, total):
            at = first + i * DEEP
            is_row = at + jnp.arange(DEEP) < last
            rows = _load(x.at[pl.ds(at, DEEP), features], is_row)
            return total + dot(rows, _load(d.at[pl.ds(at, DEEP), columns], is_row), over=(0, 0))

        none = jnp.zeros((tall, wide), jnp.float32)
        steps = (last - first + DEEP - 1) // DEEP
        total[expert, features, columns] = jax.lax.fori_loop(0, steps, part, none).astype(
            total.dtype
        )

    ends = jnp.cumsum(sizes)
    return called(
        expert_gradient,
        grid=(experts * across * along,),
        out_shape=like,
        warps=WARPS,
        stages=STAGES,
        matmul=(read, written, len(x)),
        interpret=interpret,
    )(x, d, ends - sizes, ends)


def _side(size: int, most: int) -> int:
    """The largest side of blocks that divides a size: a power of two, LEAST or more."""
    return math.gcd(size, most)


def _load(place: Any, is_row: Array) -> Array:
    from jax.experimental.pallas import triton

    mask = jnp.broadcast_to(is_row[:, None], place.shape)
    return triton.load(place, mask=mask, other=0)


def _store(place: Any, values: Array, is_row: Array) -> None:
    from jax.experimental.pallas import triton

    mask = jnp.broadcast_to(is_row[:, None], place.shape)
    triton.store(place, values.astype(place.dtype), mask=mask)
