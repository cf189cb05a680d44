"""RMSNorm, y = scale · x / sqrt(mean(x²) + eps), and LayerNorm, of centered x; in float32."""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from windlass.devices.axes import Placed, by_rows, gathered, replicated
from windlass.devices.sketch import on_one_gpu
from windlass.devices.triton import called

TOKENS, WARPS = 16, 8  # that a program of the gradient's kernel has, and of 32 threads each
TOGETHER = 2048  # numbers of an activation that it reads at a time
NARROWEST = 128  # features of which rows are a multiple
LEAST = 2.0**-60  # of a factor that is part of a matrix
SCALE = "scale"  # checkpoint name of 1 / sqrt(mean(x²) + eps)


class RMSNorm(Placed):
    scale: Float[Array, "..."]
    over: str = eqx.field(static=True)  # an axis, or several whose mean is one
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.scale = jnp.ones([sizes[name] for name in over.split()])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"scale": tuple(self.over.split())}

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        axes = len(self.axes["scale"])
        return (normed(x, self.eps, axes) * self.factor).astype(x.dtype)

    @property
    def factor(self) -> Float[Array, "..."]:
        """By which what is normed is multiplied."""
        return gathered(self.scale, self.axes["scale"])


class OffsetRMSNorm(Placed):
    """A norm whose scale is kept as its distance from 1, as in Gemma checkpoints."""

    offset: Float[Array, "*layers size"]
    over: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.offset = jnp.zeros(sizes[over])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"offset": (self.over,)}

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        return (normed(x, self.eps) * self.factor).astype(x.dtype)

    @property
    def factor(self) -> Float[Array, " size"]:
        return 1 + gathered(self.offset, (self.over,))


class LayerNorm(Placed):
    """y = scale · (x − mean(x)) / sqrt(var(x) + eps) + bias."""

    scale: Float[Array, "*layers size"]
    bias: Float[Array, "*layers size"]
    over: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.scale, self.bias = jnp.ones(sizes[over]), jnp.zeros(sizes[over])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"scale": (self.over,), "bias": (self.over,)}

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale, bias = (gathered(one, (self.over,)) for one in (self.scale, self.bias))
        return (normed(centered, self.eps) * scale + bias).astype(x.dtype)


Norm = RMSNorm | OffsetRMSNorm


def normed(x: Float[Array, "..."], eps: float, axes: int = 1) -> Float[Array, "..."]:
    """RMSNorm without a factor, x / sqrt(mean(x²) + eps), over the last axes; in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * _scale(x32, eps, axes)


def _scale(x: Float[Array, "..."], eps: float, axes: int = 1) -> Float[Array, "..."]:
    """1 / sqrt(mean(x²) + eps), in float32."""
    last = tuple(range(-axes, 0))
    square = jnp.mean(x.astype(jnp.float32) ** 2, axis=last, keepdims=True)
    return jax.lax.rsqrt(square + eps)


class Fork:
    """Hidden states where a branch leaves the residual stream, to be read through a norm.

    One kernel on one NVIDIA GPU computes the gradient of the stream: of the norm, of the sum over
    the maps that read, and of what goes past them. In plain XLA these are three passes over memory.
    Where it `takes_sums`, what the branch returns may be a sum that is yet to be computed.
    """

    def __init__(
        self, norm: Norm, stream: Float[Array, "batch seq size"], *, takes_sums: bool = False
    ):
        self.norm, self.stream, self.takes_sums = norm, stream, takes_sums

    def read(self, maps: int) -> list[Float[Array, "batch seq size"]]:
        """The normed states, for each map that reads them; the stream goes on behind this."""
        fork = functools.partial(_forked, self.norm.eps, maps)
        with jax.named_scope("norm"):
            self.stream, *read = by_rows(fork, [self.stream], [replicated(self.norm.factor)])
        return read

    def unscaled(
        self, maps: int
    ) -> tuple[list[Float[Array, "batch seq size"]], Float[Array, "batch seq 1"]]:
        """The states as they are, for each map that reads them, and the scale of their norm.

        They are for maps whose matrices have the norm's factor, and whose outputs are multiplied by
        the scale, s (x (f · W)): the normed states are never written. The gradient of the scale
        follows from theirs, and is part of the stream's.
        """
        fork = functools.partial(_unscaled, self.norm.eps, maps)
        with jax.named_scope("norm"):
            found = by_rows(fork, [self.stream], [replicated(self.norm.factor)])
        self.stream, scale, *read = found
        return read, checkpoint_name(jax.lax.stop_gradient(scale), SCALE)


def reads(x: Float[Array, "..."] | Fork, maps: int) -> list[Float[Array, "..."]]:
    """Hidden states for each map that reads them; of a fork those that are normed."""
    return x.read(maps) if isinstance(x, Fork) else [x] * maps


def has_fork(x: Float[Array, "..."]) -> bool:
    """Return True if the kernel computes the gradient of such hidden states here."""
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or not on_one_gpu():
        return False
    return x.shape[-1] % NARROWEST == 0 and math.prod(x.shape[:2]) % TOKENS == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def _forked(
    eps: float, maps: int, x: Array, factor: Array, interpret: bool = False
) -> tuple[Array, ...]:
    """x, and so often RMSNorm of it."""
    return x, *[(normed(x, eps) * factor).astype(x.dtype)] * maps


def _forked_forward(eps: float, maps: int, x: Array, factor: Array, interpret: bool):
    return _forked(eps, maps, x, factor, interpret), (x, factor)


def _forked_backward(eps: float, maps: int, interpret: bool, kept, d: Sequence[Array]):
    x, factor = kept
    d_x, d_factor, _ = stream_gradient(eps, x, factor, d, interpret=interpret)
    return d_x, d_factor


_forked.defvjp(_forked_forward, _forked_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def _unscaled(
    eps: float, maps: int, x: Array, factor: Array, interpret: bool = False
) -> tuple[Array, ...]:
    """x, the scale of its RMSNorm, and x so often."""
    return x, _scale(x, eps), *[x] * maps


def _unscaled_forward(eps: float, maps: int, x: Array, factor: Array, interpret: bool):
    return _unscaled(eps, maps, x, factor, interpret), (x, factor)


def _unscaled_backward(eps: float, maps: int, interpret: bool, kept, d: Sequence[Array]):
    """With g, the gradient of x by x (f · W), that of the normed states is g / (s f)."""
    x, factor = kept
    past, _, *read = d
    whole, ones = (past, *read), jnp.ones_like(factor)
    d_x, product, _ = stream_gradient(eps, x, ones, whole, is_scaled=True, interpret=interpret)
    return d_x, (product / divisor(factor)).astype(factor.dtype)


_unscaled.defvjp(_unscaled_forward, _unscaled_backward)


def divisor(factor: Float[Array, "..."]) -> Float[Array, "..."]:
    """A norm's factor as matrices have it: never zero, or its gradient would be lost."""
    return jnp.where(jnp.abs(factor) < LEAST, LEAST, factor)


def stream_gradient(
    eps: float,
    x: Float[Array, "batch seq size"],
    factor: Float[Array, " size"],
    d: Sequence[Float[Array, "batch seq size"]],
    *,
    is_scaled: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradient of a stream x and of the factor of a norm that reads it, and the norm's scale.

    `d` are the gradients of what goes past the norm, and of what it gives to each map; of these
    times the scale, if `is_scaled`. One pass over memory.
    """
    from jax.experimental import pallas as pl

    size = x.shape[-1]
    width = 2 ** math.ceil(math.log2(size))  # of other arrays a kernel has none
    rows = max(TOGETHER // width, 1)

    def norm_gradient(*given):
        x, past, *read, factor, d_x, d_factor, scales = given
        own_factor = _load(factor, jax.ds(0, 1), width)

        def some(i, sums):
            here = jax.ds(i * rows, rows)
            values = _load(x, here, width)
            square = jnp.sum(values * values, axis=1) / size + eps
            scale = jax.lax.rsqrt(square)[:, None]
            of_read = sum(_load(one, here, width) for one in read)
            if is_scaled:
                of_read *= jnp.sqrt(square)[:, None]
            normed, scaled = values * scale, of_read * own_factor
            along = jnp.sum(scaled * normed, axis=1) / size
            total = _load(past, here, width) + scale * (scaled - normed * along[:, None])
            _store(d_x.at[here, jax.ds(0, width)], total, size)
            _store(scales.at[here], scale[:, 0], rows)
            return sums + of_read * normed

        # Rows are added up at the end: before, no thread has to wait for those of another row.
        sums = jax.lax.fori_loop(0, TOKENS // rows, some, jnp.zeros((rows, width), jnp.float32))
        _store(d_factor.at[jax.ds(0, width)], jnp.sum(sums, axis=0), size)

    flat = [one.reshape(-1, size) for one in (x, *d)]
    tokens = len(flat[0])
    programs = tokens // TOKENS
    block = pl.BlockSpec((TOKENS, size), lambda i: (i, 0))
    d_x, parts, scale = called(
        norm_gradient,
        grid=(programs,),
        warps=WARPS,
        in_specs=[*[block] * len(flat), pl.BlockSpec((1, size), lambda i: (0, 0))],
        out_specs=[
            block,
            pl.BlockSpec((None, size), lambda i: (i, 0)),
            pl.BlockSpec((TOKENS,), lambda i: (i,)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(flat[0].shape, x.dtype),
            jax.ShapeDtypeStruct((programs, size), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
        ],
        interpret=interpret,
    )(*flat, factor[None])
    total = parts.sum(axis=0).astype(factor.dtype)
    return d_x.reshape(x.shape), total, scale.reshape(*x.shape[:-1], 1)


def _load(ref: Any, rows: Any, width: int) -> Float[Array, "rows width"]:
    """Rows in float32, with zeros behind their end."""
    from jax.experimental.pallas import triton

    mask = _mask(ref.shape[-1], width, 2)
    other = None if mask is None else 0.0
    found = triton.load(ref.at[rows, jax.ds(0, width)], mask=mask, other=other)
    return found.astype(jnp.float32)


def _store(place: Any, values: Array, size: int) -> None:
    from jax.experimental.pallas import triton

    mask = _mask(size, values.shape[-1], values.ndim)
    triton.store(place, values.astype(place.dtype), mask=mask)


def _mask(size: int, width: int, axes: int) -> Array | None:
    if size == width:
        return None
    return (jnp.arange(width) < size).reshape(*[1] * (axes - 1), width)
