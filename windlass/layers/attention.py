"""Attention with grouped queries (GQA), of a layer of a transformer."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import by_rows, replicated
from windlass.devices.sketch import on_one_gpu
from windlass.devices.triton import called, dot
from windlass.layers.kernels import spread
from windlass.layers.linear import Folded, Linear, can_fold
from windlass.layers.low_rank import (
    in_kernels,
    joint_up,
    last_output,
    outputs,
    padded,
    read_jointly,
)
from windlass.layers.norm import Fork, Norm, reads
from windlass.layers.rotary import Rotary

TOKENS, WARPS = 32, 4  # that a program of the kernel for heads has, and of 32 threads each
NARROWEST = 32  # features of its heads


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
        heads = self._jointly(x, context.position) or self._apart(x, context.position)
        return self.finished(heads, x, context)

    def finished(self, heads: Sequence[Array], x: Float[Array, "..."] | Fork, context):
        """Output of queries, keys and values of hidden states, or of a fork of them."""
        return last_output(self.output, self._attended(heads, context), x)

    def mixed(
        self,
        q: Float[Array, "batch seq heads dim"],
        k: Float[Array, "batch seq kv_heads dim"],
        v: Float[Array, "batch seq kv_heads dim"],
        context,
    ) -> Float[Array, "batch seq heads dim"]:
        """Values as attention mixes them for each head, of queries and keys as they are mapped."""
        return self._attended(self._positioned(q, k, v, context.position), context)

    def _attended(self, heads: Sequence[Array], context) -> Array:
        q, k, v = heads
        return context.attend(q, k, v, **self.how())

    def how(self) -> dict[str, Any]:
        """Settings of attention, as a context takes them."""
        return dict(causal=self.causal, window=self.window, scale=self.scale)

    def _apart(self, x: Float[Array, "batch seq embed"] | Fork, position: Array) -> Sequence[Array]:
        """Queries, keys and values, of a matmul each."""
        q, k, v = outputs((self.query, self.key, self.value), x)
        return self._positioned(q, k, v, position)

    def _positioned(self, q: Array, k: Array, v: Array, position: Array) -> Sequence[Array]:
        """Queries and keys normed and rotated, and values, as they are saved."""
        q = self._turned("query", q, self.query_norm, position)
        k = self._turned("key", spread(k), self.key_norm, position)
        return q, k, checkpoint_name(spread(v), "value")

    def _turned(
        self, name: str, x: Float[Array, "batch seq heads dim"], norm: Norm | None, position: Array
    ) -> Float[Array, "batch seq heads dim"]:
        """Queries or keys, normed and rotated by their positions, saved under a name.

        The gradient of a norm needs what it reads; that of a rotation needs the position alone, and
        so its result is saved, which is not computed again.
        """
        if norm is None:
            return checkpoint_name(x if self.rotary is None else self.rotary(x, position), name)
        return self.normed(checkpoint_name(x, name), norm, position)

    def normed(
        self, x: Float[Array, "batch seq heads dim"], norm: Norm, position: Array
    ) -> Float[Array, "batch seq heads dim"]:
        """Queries or keys, normed and rotated."""
        heads, dim = x.shape[2:]
        if not _has_kernel(x, dim, self.rotary):
            x = norm(x)
            return x if self.rotary is None else self.rotary(x, position)
        flat = Joint(x.reshape(*x.shape[:2], -1))
        (x,) = self._split(flat, (heads,), [norm], position)
        return x

    def _jointly(
        self, x: Float[Array, "batch seq embed"] | Fork, position: Array
    ) -> Sequence[Array] | None:
        """Queries, keys and values of one matmul, if there is a kernel that cuts it.

        XLA would make it one as well, but copy its parts to cut it and to join their gradients.
        """
        maps = self.query, self.key, self.value
        parts = in_kernels(maps, x)
        bases: Sequence[Any] = [part.base for part in parts] or maps
        if not self._has_kernel(bases, x):
            return None
        low = {}
        if parts:
            own, inner = read_jointly(parts, x)
            low = dict(inner=inner, up=joint_up(parts))
        else:
            (own,) = reads(x, 1)
        matrices = [replicated(one.weight.astype(own.dtype)) for one in bases]
        product = own @ jnp.concatenate([one.reshape(len(one), -1) for one in matrices], axis=1)
        biases = [replicated(one.bias).reshape(-1) for one in bases if one.bias is not None]
        bias = jnp.concatenate(biases) if biases else None
        counts = tuple(one.shape[1] for one in matrices)
        return self.cut(Joint(product, bias=bias, **low), counts, position)

    def _has_kernel(self, maps: Sequence[Any], x: Float[Array, "..."] | Fork) -> bool:
        """Return True if a kernel cuts the outputs of these maps, side by side."""
        if any(type(one) is not Linear for one in maps):
            return False
        like = x.stream if isinstance(x, Fork) else x
        return _has_kernel(like, maps[0].weight.shape[-1], self.rotary)

    def folded(self, factor: Float[Array, "*layers embed"], x: Float[Array, "..."]) -> Any:
        """The same, of forks of a stream whose norm has this factor; itself where it cannot be."""
        maps = self.query, self.key, self.value
        if not can_fold(maps) or not self._has_kernel(maps, x):
            return self
        counts = tuple(one.weight.shape[-2] for one in maps)
        rest = eqx.tree_at(lambda one: (one.query, one.key, one.value), self, (None,) * 3)
        return JointAttention(Folded.of(maps, factor), rest, counts)

    def cut(
        self, joint: "Joint", counts: tuple[int, ...], position: Array
    ) -> Sequence[Float[Array, "batch seq heads dim"]]:
        """Queries and keys, normed and rotated, and values, with what they need as it is saved."""
        norms = self.query_norm, self.key_norm, None
        if self.query_norm is not None:
            named = joint._replace(product=checkpoint_name(joint.product, "query"))
            return self._split(named, counts, norms, position)
        parts = self._split(joint, counts, norms, position)
        each = zip(parts, ("query", "key", "value"), strict=True)
        return [checkpoint_name(one, name) for one, name in each]

    def _split(
        self,
        joint: "Joint",
        counts: tuple[int, ...],
        norms: Sequence[Norm | None],
        position: Array,
    ) -> Sequence[Float[Array, "batch seq heads dim"]]:
        """Queries, or queries, keys and values, of those that lie side by side."""
        assert self.rotary is not None
        product = joint.product
        dim, eps = product.shape[-1] // sum(counts), tuple(norm and norm.eps for norm in norms)
        factors = [jnp.ones(dim) if norm is None else replicated(norm.factor) for norm in norms]
        split, factor = HeadSplit(counts, dim, eps), jnp.stack(factors)
        tokens, whole = joint.tokens, joint.whole

        def function(cos, sin, *arrays):
            *arrays, factor = arrays
            own = Joint(**dict(zip([*tokens, *whole], arrays, strict=True)))
            return split_heads(split, own, cos, sin, factor)

        turns = self.rotary.turns(position, dim, product.dtype)
        return by_rows(function, [*turns, *tokens.values()], [*whole.values(), factor])


class JointAttention(eqx.Module):
    """Attention of a fork, whose queries, keys and values are one matrix behind its norm."""

    joint: Folded
    rest: Attention
    counts: tuple[int, ...] = eqx.field(static=True)

    @jax.named_scope("attention")
    def __call__(self, x: Fork, context):
        (own,), scale = x.unscaled(1)
        joint = Joint(self.joint.product(own), bias=self.joint.bias, scale=scale)
        return self.rest.finished(self.rest.cut(joint, self.counts, context.position), x, context)


def _has_kernel(x: Array, dim: int, rotary: Rotary | None) -> bool:
    """Return True if a kernel cuts, norms and rotates such heads here, in one pass over memory.

    XLA computes the means of short rows at a fifth of the memory's speed.
    """
    is_whole = dim & (dim - 1) == 0 and dim >= NARROWEST and math.prod(x.shape[:2]) % TOKENS == 0
    is_plain = rotary is not None and rotary.pairing == "half" and rotary.share == 1
    return is_whole and is_plain and x.ndim > 2 and x.dtype == jnp.bfloat16 and on_one_gpu()


class Joint(NamedTuple):
    """Queries, keys and values side by side, as a kernel computes them: s p + u B + b."""

    product: Any  # [batch, seq, features]; None where no gradient needs it
    bias: Float[Array, " features"] | None = None
    scale: Float[Array, "batch seq 1"] | None = None  # of an RMSNorm before the product
    inner: Float[Array, "batch seq ranks"] | None = None  # u of each kind; no scale is beside it
    up: Float[Array, "rank features"] | None = None  # B of each kind

    @property
    def tokens(self) -> dict[str, Array]:
        """Arrays with a row a token."""
        return self._there("product", "scale", "inner")

    @property
    def whole(self) -> dict[str, Array]:
        return self._there("bias", "up")

    def _there(self, *names: str) -> dict[str, Array]:
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def halves(self, kind: "HeadKind") -> list[Array]:
        """In a kernel: the halves of a head in float32."""
        return [self._at(at, kind.number) for at in kind.places]

    def _at(self, at: Any, kind: int) -> Array:
        values = self.product[:, at].astype(jnp.float32)
        if self.scale is not None:
            values *= self.scale[...]
        if self.inner is not None and self.up is not None:
            rank = len(self.up)
            inner = self.inner[:, jax.ds(kind * rank, rank)]
            # Rounded as a matmul of its own would be: threads exchange it in half the time.
            more = dot(inner, self.up[:, at]).astype(inner.dtype)
            values += more.astype(jnp.float32)
        return values if self.bias is None else values + self.bias[at].astype(jnp.float32)


class HeadSplit(NamedTuple):
    """Heads that lie side by side: those of queries, or of queries, keys and values."""

    counts: tuple[int, ...]
    dim: int
    eps: tuple[float | None, ...]  # of the norm of each kind; None: it has none

    def visit(self, run: Callable[["HeadKind"], None]) -> None:
        """In a kernel with a program for some tokens of a head: run what is of its kind."""
        from jax.experimental import pallas as pl

        head = pl.program_id(0)
        for number, end in enumerate(itertools.accumulate(self.counts)):
            first = end - self.counts[number]
            kind = HeadKind(
                number, self._halves(head), self._halves(head - first), self.eps[number]
            )
            pl.when((head >= first) & (head < end))(functools.partial(run, kind))

    @property
    def ends(self) -> list[int]:
        """Features behind which another kind begins."""
        return [self.dim * end for end in itertools.accumulate(self.counts)][:-1]

    def _halves(self, head: Array) -> list[Any]:
        half = self.dim // 2
        return [jax.ds(head * self.dim, half), jax.ds(head * self.dim + half, half)]


class HeadKind(NamedTuple):
    """Queries, keys or values, in a kernel's program for one head of them."""

    number: int
    places: list[Any]  # of its two halves among all heads
    own_places: list[Any]  # among those of its kind
    eps: float | None

    @property
    def is_turned(self) -> bool:
        return self.number < 2  # not the values


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def split_heads(
    split: HeadSplit,
    joint: Joint,
    cos: Float[Array, "batch seq pairs"],
    sin: Float[Array, "batch seq pairs"],
    factors: Float[Array, "kinds dim"],
    interpret: bool = False,
) -> tuple[Float[Array, "batch seq heads dim"], ...]:
    """RoPE of RMSNorm of heads: each pair of n = factor · x / sqrt(mean(x²) + eps) is rotated.

    Where a kind has no norm n is x, and values are not rotated.
    """
    return _forward(split, joint, cos, sin, factors, interpret)[0]


def _forward(split: HeadSplit, joint: Joint, cos, sin, factors, interpret: bool):
    def split_heads(*refs):
        own, (cos, sin, factors, *out) = _refs(joint, refs)

        def run(kind: HeadKind) -> None:
            values = own.halves(kind)
            if kind.eps is not None:
                scale, factor = _scale(values, kind.eps), _factor(kind, factors)
                values = [value * scale * one for value, one in zip(values, factor, strict=True)]
            if kind.is_turned:
                values = _turned(values, cos, sin)
            for at, value in zip(kind.own_places, values, strict=True):
                out[kind.number][:, at] = value.astype(joint.product.dtype)

        split.visit(run)

    widths = [count * split.dim for count in split.counts]
    tokens, whole = [*joint.tokens.values(), cos, sin], [*joint.whole.values(), factors]
    parts = _called(split_heads, split, tokens, whole, widths, [], interpret)
    shape = cos.shape[:2]
    each = [
        part.reshape(*shape, count, split.dim)
        for part, count in zip(parts, split.counts, strict=True)
    ]
    if all(eps is None for eps in split.eps):
        joint = joint._replace(product=None)  # which no gradient needs
    return tuple(each), (joint, cos, sin, factors)


def _backward(split: HeadSplit, interpret: bool, kept, d: Sequence[Array]):
    joint, cos, sin, factors = kept
    has_bias = joint.bias is not None

    def split_heads_gradient(*refs):
        d, refs = refs[: len(split.counts)], refs[len(split.counts) :]
        own, (cos, sin, factors, d_product, d_factors, d_bias) = _refs(joint, refs)

        def run(kind: HeadKind) -> None:
            of_kind = [d[kind.number][:, at].astype(jnp.float32) for at in kind.own_places]
            if kind.is_turned:
                of_kind = _turned(of_kind, cos, sin, back=True)
            if kind.eps is not None:
                values = own.halves(kind)
                scale = _scale(values, kind.eps)
                normed = [value * scale for value in values]
                for at, one, n in zip(kind.places, of_kind, normed, strict=True):
                    d_factors[at] = jnp.sum(one * n, axis=0)
                factor = _factor(kind, factors)
                scaled = [one * f for one, f in zip(of_kind, factor, strict=True)]
                products = [a * b for a, b in zip(scaled, normed, strict=True)]
                mean = jnp.sum(products[0] + products[1], axis=1)[:, None] / split.dim
                of_kind = [scale * (one - n * mean) for one, n in zip(scaled, normed, strict=True)]
            for at, one in zip(kind.places, of_kind, strict=True):
                if has_bias:
                    d_bias[at] = jnp.sum(one, axis=0)
                one = one if own.scale is None else one * own.scale[...]
                d_product[:, at] = one.astype(d_product.dtype)

        split.visit(run)

    flat = [one.reshape(*one.shape[:2], -1) for one in d]
    tokens, whole = [*flat, *joint.tokens.values(), cos, sin], [*joint.whole.values(), factors]
    width = sum(split.counts) * split.dim
    d_product, d_factors, d_bias = _called(
        split_heads_gradient, split, tokens, whole, [width], [width, width], interpret
    )
    d_factors = d_factors.sum(axis=0).reshape(-1, split.dim)
    ends = list(itertools.accumulate(split.counts))[:-1]
    of_kinds = [
        jnp.zeros(split.dim) if eps is None else part.sum(axis=0)  # what has no norm wrote nothing
        for part, eps in zip(jnp.split(d_factors, ends), split.eps, strict=True)
    ]
    found = Joint(
        d_product.reshape(*flat[0].shape[:2], width),
        bias=d_bias.sum(axis=0).astype(joint.bias.dtype) if has_bias else None,
    )
    if joint.inner is not None:
        matrices, rank = jnp.split(joint.up, split.ends, axis=1), len(joint.up)
        matrix = padded(jax.scipy.linalg.block_diag(*matrices), 0)
        # Of all ranks and all features, of which a kind has its own.
        product = joint.inner.reshape(len(d_product), -1).T @ d_product
        up = [
            one[kind * rank : (kind + 1) * rank]
            for kind, one in enumerate(jnp.split(product, split.ends, axis=1))
        ]
        found = found._replace(
            inner=(d_product @ matrix.T).reshape(joint.inner.shape),
            up=jnp.concatenate(up, axis=1).astype(joint.up.dtype),
        )
    return found, None, None, jnp.stack(of_kinds)


split_heads.defvjp(_forward, _backward)


def _refs(joint: Joint, refs: Sequence[Any]) -> tuple[Joint, Sequence[Any]]:
    """In a kernel: the parts of what lies side by side, and cos, sin, factors and outputs."""
    tokens, whole = [*joint.tokens], [*joint.whole]
    end = len(tokens) + 2
    own = Joint(*[None] * len(Joint._fields))._replace(
        **dict(zip(tokens, refs, strict=False)), **dict(zip(whole, refs[end:], strict=False))
    )
    return own, [*refs[len(tokens) : end], *refs[end + len(whole) :]]


def _factor(kind: HeadKind, factors: Any) -> list[Array]:
    half = factors.shape[1] // 2
    return [factors[kind.number, jax.ds(begin, half)] for begin in (0, half)]


def _turned(halves: Sequence[Array], cos: Any, sin: Any, *, back: bool = False) -> list[Array]:
    left, right = halves
    c, s = (one[...].astype(jnp.float32) for one in (cos, sin))
    s = -s if back else s
    return [left * c - right * s, right * c + left * s]


def _scale(halves: Sequence[Array], eps: float) -> Array:
    """1 / sqrt(mean(x²) + eps) of each token's head."""
    square = sum(jnp.sum(half * half, axis=-1) for half in halves)
    return jax.lax.rsqrt(square / (2 * halves[0].shape[-1]) + eps)[:, None]


def _called(
    kernel: Callable,
    split: HeadSplit,
    tokens: Sequence[Float[Array, "batch seq _"]],
    whole: Sequence[Array],
    widths: Sequence[int],  # of outputs with a row a token
    sums: Sequence[int],  # of outputs in float32 with a row a program
    interpret: bool,
) -> Sequence[Array]:
    """Outputs of a kernel with a program for some tokens of each head."""
    from jax.experimental import pallas as pl

    flat = [x.reshape(-1, x.shape[-1]) for x in tokens]
    count, dtype = len(flat[0]), flat[0].dtype
    rows = count // TOKENS

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((TOKENS, width), lambda head, i: (i, 0))

    def all_of(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda head, i: (0,) * x.ndim)

    return called(
        kernel,
        # Heads first: programs that run at once read tokens as they lie in memory.
        grid=(sum(split.counts), rows),
        warps=WARPS,
        in_specs=[*[block(x.shape[-1]) for x in flat], *map(all_of, whole)],
        out_specs=[
            *map(block, widths),
            *[pl.BlockSpec((None, width), lambda head, i: (i, 0)) for width in sums],
        ],
        out_shape=[
            *[jax.ShapeDtypeStruct((count, width), dtype) for width in widths],
            *[jax.ShapeDtypeStruct((rows, width), jnp.float32) for width in sums],
        ],
        interpret=interpret,
    )(*flat, *whole)
