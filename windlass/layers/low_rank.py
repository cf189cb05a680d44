"""Products of low rank beside linear maps, in kernels on one NVIDIA GPU: y = base(x) + (x A) B.

Such a product takes as long as it takes to read and write. In plain XLA (x A) B is written at full
size, read again, and added in a pass over memory of its own; so is its part of the gradient by x.
Kernels compute it where it is added.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from windlass.devices.axes import by_rows, replicated
from windlass.devices.sketch import on_one_gpu
from windlass.devices.triton import called, dot
from windlass.layers.linear import LinearMap, LowRank
from windlass.layers.norm import Fork, normed, reads, stream_gradient

INNER = "inner"  # checkpoint name of x A
ROWS, COLUMNS = 64, 128  # tokens and features of a block, that a program has
WARPS = 4  # of 32 threads, that it has
MOST = 64  # the highest rank that kernels compute
RANKS = (16, 32, 64, 128, 256)  # of matmuls in kernels, of one map or of several side by side


def outputs(maps: Sequence[LinearMap], x: Float[Array, "..."] | Fork) -> list[Float[Array, "..."]]:
    """Outputs of linear maps that share an input."""
    if not (parts := in_kernels(maps, x)):
        return [one(own) for one, own in zip(maps, reads(x, len(maps)), strict=True)]
    return [one.total() for one in _sums(parts, x)]


def last_output(last: LinearMap, x: Float[Array, "..."], given: Float[Array, "..."] | Fork) -> Any:
    """Output of the last map of a branch, which was given hidden states or a fork of them.

    Where that takes sums, and the map has a product of low rank in kernels, it is a `Sum`.
    """
    if not (isinstance(given, Fork) and given.takes_sums and (parts := in_kernels((last,), x))):
        (y,) = outputs((last,), x)
        return y
    (left,) = _sums(parts, x)
    return left


class Sum(NamedTuple):
    """base + (x A) B, to be computed in one pass over memory with what else is added."""

    base: Float[Array, "batch seq ..."]
    inner: Float[Array, "batch seq rank"]  # x A
    up: Float[Array, "rank ..."]  # B

    def total(self, *others: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        up = replicated(self.up).reshape(len(self.up), -1)
        return by_rows(lambda *x: _added(x[:-2], *x[-2:]), [self.base, *others, self.inner], [up])


def _sums(parts: Sequence[LowRank], x: Float[Array, "..."] | Fork) -> list[Sum]:
    return [
        Sum(part.base(own), inner, part.up.weight)
        for part, (own, inner) in zip(parts, read(parts, x), strict=True)
    ]


def in_kernels(maps: Sequence[LinearMap], x: Float[Array, "..."] | Fork) -> list[LowRank]:
    """Maps with their products of low rank, if all of them have one that kernels compute here."""
    like = x.stream if isinstance(x, Fork) else x
    if not on_one_gpu() or like.dtype != jnp.bfloat16 or like.ndim < 3:
        return []
    parts = [part for part in (one.low_rank for one in maps) if part is not None]
    is_fit = len(parts) == len(maps) and math.prod(like.shape[:2]) % ROWS == 0
    return parts if is_fit and all(map(_is_fit, parts)) else []


def _is_fit(part: LowRank) -> bool:
    """Return True if the features of a map, read and written, are whole blocks."""
    features = (one.weight.size // part.rank for one in (part.down, part.up))
    return part.rank <= MOST and all(size % COLUMNS == 0 for size in features)


def read(
    parts: Sequence[LowRank], x: Float[Array, "batch seq ..."] | Fork
) -> list[tuple[Float[Array, "batch seq ..."], Float[Array, "batch seq rank"]]]:
    """x for the base of each map, and x A, of all maps in one matmul.

    Each base has an x of its own, so that the sum of its gradients is left to the kernel.
    """
    *own, inner = _reading(jnp.concatenate(_down(parts), axis=1), x, len(parts))
    ends = itertools.accumulate(part.rank for part in parts[:-1])
    each = jnp.split(inner, list(ends), axis=-1)
    return list(zip(own, each, strict=True))


def read_jointly(
    parts: Sequence[LowRank], x: Float[Array, "batch seq ..."] | Fork
) -> tuple[Float[Array, "batch seq ..."], Float[Array, "batch seq ranks"]]:
    """x for the bases of maps that are one matmul, and x A of all maps side by side.

    Each is filled up with zeros to a rank that kernels have, as `joint_up` is, and all are.
    """
    down = jnp.concatenate([padded(one, 1, _rank(parts)) for one in _down(parts)], axis=1)
    own, inner = _reading(padded(down, 1), x, 1)
    return own, inner


def _down(parts: Sequence[LowRank]) -> list[Float[Array, "features rank"]]:
    """A of each map."""
    return [replicated(part.down.weight).reshape(-1, part.rank) for part in parts]


def _rank(parts: Sequence[LowRank]) -> int:
    return max(part.rank for part in parts)


def _reading(down: Array, x: Array | Fork, copies: int) -> Sequence[Array]:
    if isinstance(x, Fork):
        reading = functools.partial(_read_fork, x.norm.eps, copies)
        x.stream, *found = by_rows(reading, [x.stream], [replicated(x.norm.factor), down])
    else:
        found = by_rows(functools.partial(_read, copies=copies), [x], [down])
    *own, inner = found
    return *own, checkpoint_name(inner, INNER)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 5))
def _read_fork(
    eps: float, copies: int, x: Array, factor: Array, down: Array, interpret: bool = False
) -> tuple[Array, ...]:
    """x, so often n = RMSNorm(x), and n A.

    The gradient of A is nᵀ d = f · (xᵀ (s d)), with the norm's scale s and factor f: n is not
    computed again for it.
    """
    n = (normed(x, eps) * factor).astype(x.dtype)
    return x, *[n] * copies, _tokens(n, 2) @ down


def _read_fork_forward(eps: float, copies: int, x, factor, down, interpret: bool):
    return _read_fork(eps, copies, x, factor, down, interpret), (x, factor, down)


def _read_fork_backward(eps: float, copies: int, interpret: bool, kept, d: Sequence[Array]):
    x, factor, down = kept
    past, *of_bases, of_inner = d
    of_normed = add_product(of_bases, of_inner, down.T, interpret)
    d_x, d_factor, scale = stream_gradient(eps, x, factor, (past, of_normed), interpret=interpret)
    scaled = (scale * of_inner.astype(jnp.float32)).astype(x.dtype)
    product = _tokens(x, 1).T @ _tokens(scaled, 1)
    d_down = factor[:, None] * product.astype(jnp.float32)
    return d_x, d_factor, d_down.astype(down.dtype)


_read_fork.defvjp(_read_fork_forward, _read_fork_backward)


def joint_up(parts: Sequence[LowRank]) -> Float[Array, "rank features"]:
    """B of several maps side by side."""
    matrices = [replicated(part.up.weight).reshape(part.rank, -1) for part in parts]
    return jnp.concatenate([padded(one, 0, _rank(parts)) for one in matrices], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _read(x: Array, down: Array, copies: int = 1, interpret: bool = False) -> tuple[Array, ...]:
    return *[x] * copies, _tokens(x, 2) @ down


def _read_forward(x: Array, down: Array, copies: int, interpret: bool):
    return _read(x, down, copies, interpret), (x, down)


def _read_backward(copies: int, interpret: bool, kept, d: Sequence[Array]):
    x, down = kept
    *of_bases, of_inner = d
    d_down = _tokens(x, 1).T @ _tokens(of_inner, 1)
    return add_product(of_bases, of_inner, down.T, interpret), d_down.astype(down.dtype)


_read.defvjp(_read_forward, _read_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _added(bases: tuple[Array, ...], inner: Array, up: Array, interpret: bool = False) -> Array:
    return add_product(bases, inner, up, interpret)


def _added_forward(bases: tuple[Array, ...], inner: Array, up: Array, interpret: bool):
    return add_product(bases, inner, up, interpret), (len(bases), inner, up)


def _added_backward(interpret: bool, kept, d: Array):
    bases, inner, up = kept
    flat = _tokens(d, 1)
    d_up = inner.reshape(-1, len(up)).T @ flat
    return (d,) * bases, (flat @ up.T).reshape(inner.shape), d_up.astype(up.dtype)


_added.defvjp(_added_forward, _added_backward)


def _tokens(x: Array, leading: int) -> Array:
    """An activation with one axis of features, and one or two of tokens."""
    shape = x.shape[:2] if leading == 2 else (-1,)
    return x.reshape(*shape, math.prod(x.shape[2:]))


def add_product(
    bases: Sequence[Float[Array, "batch seq ..."]],
    inner: Float[Array, "batch seq rank"],
    matrix: Float[Array, "rank features"],
    interpret: bool = False,
) -> Float[Array, "batch seq ..."]:
    """Sum of bases and of inner · matrix, written over the first of them."""
    from jax.experimental import pallas as pl

    def low_rank(*given):
        *bases, inner, matrix, out = given
        total = dot(inner[...], matrix[...])
        for base in bases:
            total += base[...].astype(jnp.float32)
        out[...] = total.astype(out.dtype)

    flat = [_tokens(base, 1) for base in bases]
    tokens, features = flat[0].shape
    inner, matrix = padded(_tokens(inner, 1), 1), padded(matrix, 0)
    block = pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j))
    thin = pl.BlockSpec((ROWS, len(matrix)), lambda i, j: (i, 0))
    wide = pl.BlockSpec((len(matrix), COLUMNS), lambda i, j: (0, j))
    out = called(
        low_rank,
        grid=(tokens // ROWS, features // COLUMNS),
        warps=WARPS,
        in_specs=[block] * len(flat) + [thin, wide],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(flat[0].shape, flat[0].dtype),
        input_output_aliases={0: 0},
        interpret=interpret,
    )(*flat, inner, matrix)
    return out.reshape(bases[0].shape)


def padded(x: Array, axis: int, least: int = 0) -> Array:
    """An array with its axis of rank filled up with zeros to one that kernels have."""
    own = x.shape[axis]
    more = next(rank for rank in RANKS if rank >= max(own, least)) - own
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x
