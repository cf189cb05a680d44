"""Attention with grouped queries (GQA), of a layer of a transformer."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import by_rows, replicated
from windlass.devices.sketch import on_one_gpu
from windlass.devices.triton import called
from windlass.layers.kernels import spread
from windlass.layers.linear import Linear
from windlass.layers.low_rank import last_output, outputs
from windlass.layers.norm import Fork, Norm
from windlass.layers.rotary import Rotary

BLOCK = 4096  # numbers that a program of the kernel for queries and keys has


class Attention(eqx.Module):
    """Softmax attention over the positions of the own document, with RoPE or without."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        rotary: Rotary | None,  # None: positions do not turn queries and keys
        bias: bool = False,  # on queries, keys and values
        output_bias: bool = False,
        norm: Callable[[str], Norm] | None = None,  # of queries and keys, over a named axis
        causal: bool = True,  # sees no position after its own
        window: int | None = None,  # positions a query sees, its own included; None: all
        scale: float | None = None,  # of scores; None: 1 / sqrt(head_dim)
        key: PRNGKeyArray,
    ):
        q, k, v, o = jax.random.split(key, 4)
        self.query = Linear("embed", "heads head_dim", sizes, bias=bias, key=q)
        self.key = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=k)
        self.value = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=v)
        self.output = Linear("heads head_dim", "embed", sizes, bias=output_bias, key=o)
        self.query_norm = None if norm is None else norm("head_dim")
        self.key_norm = None if norm is None else norm("head_dim")
        self.rotary = rotary
        self.causal, self.window, self.scale = causal, window, scale

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork, context):
        q, k, v = outputs((self.query, self.key, self.value), x)
        q = self._turned("query", q, self.query_norm, context.position)
        k = self._turned("key", spread(k), self.key_norm, context.position)
        v = checkpoint_name(spread(v), "value")
        how = dict(causal=self.causal, window=self.window, scale=self.scale)
        return last_output(self.output, context.attend(q, k, v, **how), x)

    def _turned(
        self, name: str, x: Float[Array, "batch seq heads dim"], norm: Norm | None, position: Array
    ) -> Float[Array, "batch seq heads dim"]:
        """Queries or keys, normed and rotated by their positions, saved under a name.

        The gradient of a norm needs what it reads; that of a rotation needs the position alone, and
        so its result is saved, which is not computed again.
        """
        if norm is None:
            return checkpoint_name(x if self.rotary is None else self.rotary(x, position), name)
        x = checkpoint_name(x, name)
        if self.rotary is None or not _has_kernel(x, self.rotary):
            x = norm(x)
            return x if self.rotary is None else self.rotary(x, position)
        turns = self.rotary.turns(position, x.shape[-1], x.dtype)
        turned = functools.partial(_norm_and_turn, norm.eps)
        return by_rows(turned, [x, *turns], [replicated(norm.factor)])


def _has_kernel(x: Float[Array, "batch seq heads dim"], rotary: Rotary) -> bool:
    """Return True if a kernel norms and rotates such heads here, in one pass over memory.

    XLA computes the means of short rows at a fifth of the memory's speed.
    """
    heads, dim = x.shape[2:]
    is_whole = all(size & (size - 1) == 0 for size in (heads, dim)) and heads * dim <= BLOCK
    is_cut = math.prod(x.shape[:2]) % (BLOCK // (heads * dim)) == 0 if is_whole else False
    return is_cut and rotary.pairing == "half" and x.dtype == jnp.bfloat16 and on_one_gpu()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _norm_and_turn(
    eps: float, x: Array, cos: Array, sin: Array, factor: Array, interpret: bool = False
) -> Array:
    """RoPE of RMSNorm: each pair of n = factor · x / sqrt(mean(x²) + eps) rotated by its angle."""
    return _forward(eps, x, cos, sin, factor, interpret)[0]


def _forward(eps: float, x: Array, cos: Array, sin: Array, factor: Array, interpret: bool):
    dim = x.shape[-1]

    def norm_and_turn(x, cos, sin, factor, out):
        halves = _halves(dim)
        values = [x[:, :, half].astype(jnp.float32) for half in halves]
        scale = _scale(values, eps)
        left, right = (
            value * scale * factor[half] for value, half in zip(values, halves, strict=True)
        )
        c, s = (one[...][:, None, :].astype(jnp.float32) for one in (cos, sin))
        out[:, :, halves[0]] = (left * c - right * s).astype(out.dtype)
        out[:, :, halves[1]] = (right * c + left * s).astype(out.dtype)

    (out,) = _called(norm_and_turn, (x, cos, sin), factor, [x], interpret)
    return out.reshape(x.shape), (x, cos, sin, factor)


def _backward(eps: float, interpret: bool, kept, d: Array):
    x, cos, sin, factor = kept
    dim = x.shape[-1]

    def norm_and_turn_gradient(x, d, cos, sin, factor, d_x, d_factor):
        halves = _halves(dim)
        values = [x[:, :, half].astype(jnp.float32) for half in halves]
        scale = _scale(values, eps)
        normed = [value * scale for value in values]
        c, s = (one[...][:, None, :].astype(jnp.float32) for one in (cos, sin))
        left, right = (d[:, :, half].astype(jnp.float32) for half in halves)
        back = left * c + right * s, right * c - left * s
        scaled = [one * factor[half] for one, half in zip(back, halves, strict=True)]
        along = sum(jnp.sum(a * b, axis=-1) for a, b in zip(scaled, normed, strict=True)) / dim
        for half, own, n, turned in zip(halves, scaled, normed, back, strict=True):
            d_x[:, :, half] = (scale * (own - n * along[:, :, None])).astype(d_x.dtype)
            d_factor[half] = jnp.sum(jnp.sum(turned * n, axis=0), axis=0)

    d_x, parts = _called(norm_and_turn_gradient, (x, d, cos, sin), factor, [x, factor], interpret)
    return d_x.reshape(x.shape), None, None, parts.sum(axis=0)


_norm_and_turn.defvjp(_forward, _backward)


def _halves(dim: int) -> list[Any]:
    return [jax.ds(0, dim // 2), jax.ds(dim // 2, dim // 2)]


def _scale(halves: Sequence[Array], eps: float) -> Array:
    """1 / sqrt(mean(x²) + eps) of each head."""
    square = sum(jnp.sum(half * half, axis=-1) for half in halves)
    return jax.lax.rsqrt(square / (2 * halves[0].shape[-1]) + eps)[:, :, None]


def _called(
    kernel: Callable, tokens: Sequence[Array], factor: Array, outputs: Sequence[Array], interpret
) -> Sequence[Array]:
    """Outputs of a kernel whose programs have some tokens each: like `x`, or sums over tokens."""
    from jax.experimental import pallas as pl

    heads, dim = tokens[0].shape[2:]
    count, size = math.prod(tokens[0].shape[:2]), max(BLOCK // (heads * dim), 1)

    def block(x: Array) -> pl.BlockSpec:
        if x.ndim == 1:
            return pl.BlockSpec(x.shape, lambda i: (0,))
        own = x.shape[2:]
        return pl.BlockSpec((size, *own), lambda i: (i, *[0] * len(own)))

    def output(x: Array) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        if x.ndim > 1:
            return jax.ShapeDtypeStruct((count, *x.shape[2:]), x.dtype), block(x)
        part = pl.BlockSpec((None, dim), lambda i: (i, 0))
        return jax.ShapeDtypeStruct((count // size, dim), jnp.float32), part

    shapes, out_specs = zip(*map(output, outputs), strict=True)
    return called(
        kernel,
        grid=(count // size,),
        in_specs=[block(x) for x in (*tokens, factor)],
        out_specs=list(out_specs),
        out_shape=list(shapes),
        interpret=interpret,
    )(*[x.reshape(count, *x.shape[2:]) for x in tokens], factor)
