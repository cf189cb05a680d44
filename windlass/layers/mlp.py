"""Gated MLPs (feed-forward layers): down(activation(gate(x)) · up(x))."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import by_rows, replicated
from windlass.devices.sketch import on_one_gpu
from windlass.devices.triton import called, dot, sigmoid
from windlass.layers.linear import Folded, Linear, LowRank, can_fold
from windlass.layers.low_rank import (
    COLUMNS,
    INNER,
    MOST,
    ROWS,
    Sum,
    in_kernels,
    outputs,
    padded,
    read,
)
from windlass.layers.norm import Fork

SHORT, LONG = 32, 1024  # tokens of a block of the gradient's kernel, and of its sums over tokens
WARPS, STAGES = 4, 4  # of 32 threads each, and of its pipeline, that it has


class Gated(eqx.Module):
    """A gated linear unit: SwiGLU with silu, GeGLU with gelu."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        activation: Callable = jax.nn.silu,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed", "mlp", sizes, bias=bias, key=gate)
        self.up = Linear("embed", "mlp", sizes, bias=bias, key=up)
        self.down = Linear("mlp", "embed", sizes, bias=bias, key=down)
        self.activation = activation

    @jax.named_scope("mlp")
    def __call__(self, x: Float[Array, "... embed"] | Fork) -> Any:  # like x; a sum, if x takes it
        if parts := self._low_rank(x):
            return self._in_kernels(parts, x)
        gate, up = outputs((self.gate, self.up), x)
        return self.output(checkpoint_name(gate, "gate"), checkpoint_name(up, "up"))

    def folded(self, factor: Float[Array, "*layers embed"]) -> "Gated | FoldedGated":
        """The same, of forks of a stream whose norm has this factor; itself where it cannot be."""
        if not can_fold((self.gate, self.up)):
            return self
        rest = eqx.tree_at(lambda one: (one.gate, one.up), self, (None, None))
        return FoldedGated(Folded.of([self.gate], factor), Folded.of([self.up], factor), rest)

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        is_silu = self.activation is jax.nn.silu and on_one_gpu()
        (y,) = outputs((self.down,), (silu if is_silu else self.activation)(gate) * up)
        return y

    def _low_rank(self, x: Float[Array, "... embed"] | Fork) -> list[LowRank]:
        """Its maps with products of low rank, if it is SwiGLU that kernels compute here."""
        is_swiglu = type(self) is Gated and self.activation is jax.nn.silu
        return in_kernels((self.gate, self.up, self.down), x) if is_swiglu else []

    def _in_kernels(self, parts: list[LowRank], x: Float[Array, "batch seq embed"] | Fork):
        gate, up, down = parts
        (for_gate, gate_inner), (for_up, up_inner) = read([gate, up], x)
        raw = (
            checkpoint_name(gate.base(for_gate), "gate"),
            checkpoint_name(up.base(for_up), "up"),
        )
        matrices = [replicated(one.weight) for one in (gate.up, up.up, down.down)]
        hidden, inner = swiglu_low_rank(*raw, LowRankFactors(gate_inner, up_inner, *matrices))
        left = Sum(down.base(hidden), checkpoint_name(inner, INNER), down.up.weight)
        return left if isinstance(x, Fork) and x.takes_sums else left.total()


class FoldedGated(eqx.Module):
    """A gated MLP of a fork, whose gate and up have the factor of its norm."""

    gate: Folded
    up: Folded
    rest: Gated

    @jax.named_scope("mlp")
    def __call__(self, x: Fork) -> Float[Array, "batch seq embed"]:
        (for_gate, for_up), scale = x.unscaled(2)
        gate = checkpoint_name(self.gate.product(for_gate), "gate")
        up = checkpoint_name(self.up.product(for_up), "up")
        return self.rest.output(self.gate.output(gate, scale), self.up.output(up, scale))


class NormGated(Gated):
    """A gated linear unit of bounded size: down(σ(gate) · RMSNorm(gate ⊙ up)), without a scale.

    With the RMS r of gate ⊙ up this is SwiGLU divided by r, after `down`: gate and up, which are
    large, are then read once.
    """

    eps: float = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], *, eps: float, key: PRNGKeyArray):
        super().__init__(sizes, key=key)
        self.eps = eps

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        square = jnp.square(gate.astype(jnp.float32) * up.astype(jnp.float32))
        scale = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + self.eps)
        return super().output(gate, up) * scale.astype(up.dtype)


@jax.custom_jvp
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x σ(x) without a division, of which a GPU makes more instructions than of all else here.

    With r = 1 / sqrt(1 + exp(-x)), which is one instruction, σ(x) is r².
    """
    x32, share = _with_sigmoid(x)
    return (x32 * share).astype(x.dtype)


@silu.defjvp
def _silu_tangent(given: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    x32, share = _with_sigmoid(given[0])
    slope = share + x32 * share * (1 - share)
    return silu(given[0]), (slope * tangents[0].astype(jnp.float32)).astype(given[0].dtype)


def _with_sigmoid(x: Array) -> tuple[Array, Array]:
    x32 = x.astype(jnp.float32)
    root = jax.lax.rsqrt(1 + jnp.exp(-x32))
    return x32, root * root


def swiglu_low_rank(
    gate: Float[Array, "batch seq mlp"], up: Float[Array, "batch seq mlp"], low: "LowRankFactors"
) -> tuple[Float[Array, "batch seq mlp"], Float[Array, "batch seq rank"]]:
    """silu(gate + u B) · (up + u' B') and its product with A, by kernels, on one device."""
    rank = low.down.shape[-1]
    filled = [padded(x, axis) for x, axis in zip(low, (2, 2, 0, 0, 1), strict=True)]
    given = [gate, up, *filled[:2]]
    hidden, inner = by_rows(
        lambda *x: _in_kernels(*x[:2], LowRankFactors(*x[2:])), given, filled[2:]
    )
    return hidden, inner[..., :rank]


class LowRankFactors(NamedTuple):
    """Factors of low rank beside the maps of a gated MLP."""

    gate_inner: Float[Array, "... rank"]  # x A of `gate`
    up_inner: Float[Array, "... rank"]  # x A of `up`
    gate: Float[Array, "rank mlp"]  # B of `gate`
    up: Float[Array, "rank mlp"]  # B of `up`
    down: Float[Array, "mlp rank"]  # A of `down`


def swiglu_formula(gate: Array, up: Array, low: LowRankFactors) -> tuple[Array, Array]:
    hidden = jax.nn.silu(gate + low.gate_inner @ low.gate) * (up + low.up_inner @ low.up)
    return hidden, hidden @ low.down


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_kernels(gate: Array, up: Array, low: LowRankFactors, interpret: bool = False):
    """The formula in one pass over gate and up, and one over them and the gradient.

    What is of low rank is computed where it is added: it is never written at full size.
    """
    return _forward(gate, up, low, interpret)[0]


def _forward(gate: Array, up: Array, low: LowRankFactors, interpret: bool):
    from jax.experimental import pallas as pl

    (tokens, width), rank = _flat(gate).shape, low.down.shape[-1]

    def swiglu_low_rank(gate, up, gate_inner, up_inner, gate_up, up_up, down, hidden, inner):
        own = gate_inner[...], up_inner[...]

        def part(i, total):
            at = pl.ds(i * COLUMNS, COLUMNS)
            g = _plus(gate[:, at], own[0], gate_up[:, at])
            u = _plus(up[:, at], own[1], up_up[:, at])
            value = (g * sigmoid(g, interpret=interpret) * u).astype(hidden.dtype)
            hidden[:, at] = value
            return total + dot(value, down[at, :])

        none = jnp.zeros((ROWS, rank), jnp.float32)
        total = jax.lax.fori_loop(0, width // COLUMNS, part, none)
        inner[...] = total.astype(inner.dtype)

    block, thin = (pl.BlockSpec((ROWS, size), lambda i: (i, 0)) for size in (width, rank))
    wide = pl.BlockSpec((rank, width), lambda i: (0, 0))
    tall = pl.BlockSpec((width, rank), lambda i: (0, 0))
    hidden, inner = called(
        swiglu_low_rank,
        grid=(tokens // ROWS,),
        in_specs=[block, block, thin, thin, wide, wide, tall],
        out_specs=[block, thin],
        out_shape=[jax.ShapeDtypeStruct((tokens, size), gate.dtype) for size in (width, rank)],
        stages=3 if rank < MOST else 2,  # as many as shared memory holds
        interpret=interpret,
    )(_flat(gate), _flat(up), *map(_flat, low[:2]), *low[2:])
    out = hidden.reshape(gate.shape), inner.reshape(low.gate_inner.shape)
    return out, (gate, up, low)


def _backward(interpret: bool, kept, d):
    from jax.experimental import pallas as pl

    gate, up, low = kept
    (tokens, width), rank = _flat(gate).shape, low.down.shape[-1]
    splits = next(n for n in range(-(-tokens // LONG), 0, -1) if tokens % (n * SHORT) == 0)
    long = tokens // splits

    def swiglu_low_rank_gradient(gate, up, d, gate_inner, up_inner, d_inner, *rest):
        gate_up, up_up, down, d_gate, d_up, d_gate_up, d_up_up, d_down = rest
        own = gate_up[...], up_up[...], down[...]

        def part(i, totals):
            at = pl.ds(i * SHORT, SHORT)
            inner = gate_inner[at, :], up_inner[at, :], d_inner[at, :]
            g = _plus(gate[at, :], inner[0], own[0])
            u = _plus(up[at, :], inner[1], own[1])
            of_hidden = _plus(d[at, :], inner[2], own[2], over=(1, 1))
            share = sigmoid(g, interpret=interpret)
            silu = g * share
            of_gate = (of_hidden * u * (share + silu * (1 - share))).astype(d_gate.dtype)
            of_up = (of_hidden * silu).astype(d_up.dtype)
            d_gate[at, :], d_up[at, :] = of_gate, of_up
            hidden = (silu * u).astype(d_up.dtype)
            return (
                totals[0] + dot(inner[0], of_gate, over=(0, 0)),
                totals[1] + dot(inner[1], of_up, over=(0, 0)),
                totals[2] + dot(hidden, inner[2], over=(0, 0)),
            )

        none = [jnp.zeros(x.shape, jnp.float32) for x in (own[0], own[1], own[2])]
        totals = jax.lax.fori_loop(0, long // SHORT, part, tuple(none))
        d_gate_up[...], d_up_up[...], d_down[...] = totals

    block = pl.BlockSpec((long, COLUMNS), lambda i, j: (j, i))
    thin = pl.BlockSpec((long, rank), lambda i, j: (j, 0))
    wide = pl.BlockSpec((rank, COLUMNS), lambda i, j: (0, i))
    tall = pl.BlockSpec((COLUMNS, rank), lambda i, j: (i, 0))
    wide_part = pl.BlockSpec((None, rank, COLUMNS), lambda i, j: (j, 0, i))
    tall_part = pl.BlockSpec((None, COLUMNS, rank), lambda i, j: (j, i, 0))
    full = jax.ShapeDtypeStruct((tokens, width), gate.dtype)
    of_wide = jax.ShapeDtypeStruct((splits, rank, width), jnp.float32)
    of_tall = jax.ShapeDtypeStruct((splits, width, rank), jnp.float32)
    d_gate, d_up, *parts = called(
        swiglu_low_rank_gradient,
        grid=(width // COLUMNS, splits),
        in_specs=[block] * 3 + [thin] * 3 + [wide, wide, tall],
        out_specs=[block, block, wide_part, wide_part, tall_part],
        out_shape=[full, full, of_wide, of_wide, of_tall],
        input_output_aliases={0: 0, 1: 1},
        warps=WARPS,
        stages=STAGES,
        interpret=interpret,
    )(*map(_flat, (gate, up, d[0], *low[:2], d[1])), *low[2:])
    inner = [
        (x @ factor.T).reshape(low.gate_inner.shape)
        for x, factor in ((d_gate, low.gate), (d_up, low.up))
    ]
    factors = [part.sum(axis=0).astype(one.dtype) for part, one in zip(parts, low[2:], strict=True)]
    return d_gate.reshape(gate.shape), d_up.reshape(up.shape), LowRankFactors(*inner, *factors)


_in_kernels.defvjp(_forward, _backward)


def _plus(base: Array, inner: Array, factor: Array, **how: Any) -> Array:
    """base + inner · factor of a block in float32.

    Its threads exchange the product, which takes half as long in 16 bits; so it is rounded as a
    matmul of its own would be.
    """
    product = dot(inner, factor, **how).astype(base.dtype)
    return base.astype(jnp.float32) + product.astype(jnp.float32)


def _flat(x: Float[Array, "... a"]) -> Float[Array, "tokens a"]:
    return x.reshape(-1, x.shape[-1])
