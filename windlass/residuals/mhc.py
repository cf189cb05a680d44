"""Manifold-constrained hyper-connections (mHC): n residual streams and doubly stochastic mixing.

The paper is https://arxiv.org/abs/2512.24880. With the streams of a token x ∈ R^{n×C} and
x' = RMSNorm(vec(x)), for each branch F of a block

    pre  = σ(α₁ φ_pre x' + b_pre)                ∈ R^n, the weights by which F reads the streams
    post = 2 σ(α₂ φ_post x' + b_post)            ∈ R^n, those by which they are written
    res  = Sinkhorn(exp(α₃ φ_res x' + b_res))    ∈ R^{n×n}, doubly stochastic
    x   ← res x + postᵀ F(pre x)

A product of doubly stochastic matrices is one, so that no depth makes the streams grow or vanish.

At first φ = 0, b_post = 0 and the streams are n copies. They stay so while pre sums to 1, which is
then x + F(x) in every stream. Each layer reads another stream most: were streams alike in what
reads and writes them too, so would be their gradients, and they would stay one stream for ever.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass import doubly_stochastic
from windlass.config import section
from windlass.devices.axes import Placed, device, gathered, layout
from windlass.doubly_stochastic import Matrix, Vector, total, transposed
from windlass.layers.auxiliary import Report, over_tokens
from windlass.layers.residual import Branch, Connection, Hidden, Plain
from windlass.networks.sinkhorn import sinkhorn
from windlass.residuals import BaseResidual

Tokens = Float[Array, "batch seq"]
Logits = Float[Array, "coefficients batch seq"]

ALPHA = 0.01  # of the paper: what a token adds to the biases is small at first
DIAGONAL = 6.0  # logit of a stream's own share of itself at first: 0.993 of it for n = 4
FIRST = 0.7  # share of a layer's own stream in what it reads at first
EPS = 1e-6  # of the norm


class StreamState(NamedTuple):
    """Residual streams, and the product of all mixing matrices so far, for its gain.

    An array for each stream: an axis of n in front of the width would be padded on TPUs, and any
    other would be moved or sliced.
    """

    streams: tuple[Hidden, ...]
    product: Matrix


class Coefficients(NamedTuple):
    """Weights of one branch for every token, in float32: x ← res x + postᵀ F(pre x)."""

    pre: Vector
    post: Vector
    res: Matrix


@section
class HyperStreams(BaseResidual):
    """n streams: copies of the embedding at first, and their mean in the end."""

    streams: int = 4  # residual streams; 1: a plain residual

    def __post_init__(self):
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}; it must be 1 or more")

    @property
    def are_several(self) -> bool:
        return self.streams > 1

    @abstractmethod
    def hyper_connection(self, layer: Int[Array, ""], width: int) -> "HyperConnection":
        """The connection of a branch between two streams or more, each of a width."""

    def connection(
        self, branch: str, layer: Int[Array, ""], sizes: Mapping[str, int], *, key: PRNGKeyArray
    ) -> Connection:
        return Plain() if self.streams == 1 else self.hyper_connection(layer, sizes["embed"])

    def widen(self, x: Hidden) -> Hidden | StreamState:
        if self.streams == 1:
            return x
        zero, every = jnp.zeros_like(x[..., 0], jnp.float32), range(self.streams)
        identity = tuple(tuple(zero + float(i == j) for j in every) for i in every)
        return StreamState((x,) * self.streams, identity)

    def narrow(self, x: Hidden | StreamState) -> Hidden:
        if not isinstance(x, StreamState):
            return x
        sums = total(one.astype(jnp.float32) for one in x.streams)
        return (sums / len(x.streams)).astype(x.streams[0].dtype)

    def report(self, x: Hidden | StreamState, context) -> Report:
        """Composite gain over all layers, as the mean over tokens.

        It bounds the factor by which a stream grows on its way there, and a gradient on its way
        back.
        """
        if not isinstance(x, StreamState):
            return {}
        ways = {"forward": x.product, "backward": transposed(x.product)}
        gains = {way: doubly_stochastic.gain(product) for way, product in ways.items()}
        return {
            f"residual_gain_{way}": over_tokens(gain, context.document)
            for way, gain in gains.items()
        }


class HyperConnection(Connection, Placed):
    """A branch F between n streams: x ← res x + postᵀ F(pre x), with coefficients of each token.

    Saved for the backward pass are F's output and the few numbers that coefficients are made of.
    Streams in between, float32 copies and coefficients are made again.
    """

    phi: eqx.AbstractVar[Float[Array, "..."]]  # from the streams to coefficients
    alpha: eqx.AbstractVar[Float[Array, "*layers parts"]]
    pre: eqx.AbstractVar[Float[Array, "*layers streams"]]
    post: eqx.AbstractVar[Float[Array, "*layers streams"]]
    res: eqx.AbstractVar[Float[Array, "..."]]
    matrices: ClassVar[tuple[str, ...]] = ("phi",)

    @abstractmethod
    def coefficients(self, x: tuple[Hidden, ...]) -> Coefficients: ...

    def __call__(self, x: StreamState, branch: Branch, context) -> StreamState:
        # A barrier, as a compiler may else compute them anew for every channel that they weigh.
        pre, post, res = jax.lax.optimization_barrier(self.coefficients(x.streams))
        y = checkpoint_name(branch(_read(x.streams, pre)), "residual")
        mixing = jax.lax.stop_gradient(res)
        _report(mixing, context)
        product = doubly_stochastic.matmul(mixing, x.product)
        streams = _written(x.streams, y, post, res)
        if device().platform in ("gpu", "cuda"):
            # And one around streams, which XLA else keeps in the float32 that they are summed in.
            # TPUs hold them in fast memory, where a barrier costs more than it saves.
            streams = jax.lax.optimization_barrier(streams)
        return StreamState(streams, product)


@section
class Residual(HyperStreams):
    """Manifold-constrained hyper-connections: mixing matrices are doubly stochastic."""

    iterations: int = 20  # of Sinkhorn's normalization, of columns and then rows

    def __post_init__(self):
        super().__post_init__()
        if self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; it must be 1 or more")

    def hyper_connection(self, layer: Int[Array, ""], width: int) -> HyperConnection:
        return ManifoldConnection(self.streams, layer, width, self.iterations)


class SigmoidConnection(HyperConnection):
    """Reading weights from 0 to 1, writing weights from 0 to 2, of mHC and mHC-lite alike."""

    phi: Float[Array, "*layers coefficients streams embed"]
    alpha: Float[Array, "*layers parts"]
    pre: Float[Array, "*layers streams"]
    post: Float[Array, "*layers streams"]
    res: Float[Array, "..."]
    res_axes: eqx.AbstractClassVar[tuple[str, ...]]

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        phi, vector = ("coefficients", "streams", "embed"), ("streams",)
        return dict(phi=phi, alpha=("parts",), pre=vector, post=vector, res=self.res_axes)

    @abstractmethod
    def mixing(self, logits: Logits) -> Matrix:
        """Doubly stochastic matrices, from as many logits as `res` has entries."""

    def _start(self, n: int, layer: Int[Array, ""], width: int, res: Float[Array, "..."]) -> None:
        self.phi, self.alpha = jnp.zeros((2 * n + res.size, n, width)), jnp.full(3, ALPHA)
        own, other = (math.log(p / (1 - p)) for p in (FIRST, (1 - FIRST) / (n - 1)))
        self.pre = jnp.where(jnp.arange(n) == layer % n, own, other)
        self.post, self.res = jnp.zeros(n), res

    def coefficients(self, x: tuple[Hidden, ...]) -> Coefficients:
        n, phi = len(x), gathered(self.phi.astype(x[0].dtype), self.axes["phi"])
        products = total(product(phi[:, j], one) for j, one in enumerate(x))
        # Division by the norm after the product: the streams are read as they are.
        products = checkpoint_name(products, "residual") * inverse_rms(*x)
        biases = jnp.concatenate([self.pre, self.post, self.res.reshape(-1)])
        logits = scaled(products, self.alpha, biases, (n, n, self.res.size))
        return Coefficients(
            pre=tuple(jax.nn.sigmoid(logits[:n])),
            post=tuple(2 * jax.nn.sigmoid(logits[n : 2 * n])),
            res=self.mixing(logits[2 * n :]),
        )


class ManifoldConnection(SigmoidConnection):
    """The connection of mHC: mixing matrices by Sinkhorn's normalization."""

    iterations: int = eqx.field(static=True)
    res_axes: ClassVar[tuple[str, ...]] = ("streams", "streams")

    def __init__(self, n: int, layer: Int[Array, ""], width: int, iterations: int):
        self._start(n, layer, width, DIAGONAL * jnp.eye(n))
        self.iterations = iterations

    def mixing(self, logits: Logits) -> Matrix:
        return sinkhorn(logits, self.iterations)


def scaled(
    x: Logits,
    alpha: Float[Array, " parts"],
    biases: Float[Array, " coefficients"],
    counts: Sequence[int],
) -> Logits:
    """α x + b, with an α for each part, of so many coefficients.

    As one array: the gradients of a number for each would be as many sums over all tokens, which
    are a launch or two each.
    """
    each = jnp.concatenate([jnp.full(count, a) for a, count in zip(alpha, counts, strict=True)])
    return each[:, None, None] * x + biases[:, None, None]


def product(phi: Float[Array, "coefficients embed"], x: Hidden) -> Logits:
    """φ x of every token, summed in float32, with coefficients in front: no axis is moved."""
    out = layout(". batch seq", (len(phi), *x.shape[:2]))
    contracted = (((1,), (2,)), ((), ()))
    return jax.lax.dot_general(
        phi, x, contracted, preferred_element_type=jnp.float32, out_sharding=out
    )


def inverse_rms(*x: Hidden) -> Tokens:
    """1 / sqrt(mean(x²) + eps) over all streams given."""
    squares = checkpoint_name(total(map(_squares, x)), "residual")
    return jax.lax.rsqrt(squares / (len(x) * x[0].shape[-1]) + EPS)


# Rematerialised whatever a recipe saves: float32 operands are twice the bytes of all streams.
_again = partial(jax.checkpoint, prevent_cse=False)


@_again
def _squares(x: Hidden) -> Tokens:
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)


@_again
def _read(x: tuple[Hidden, ...], pre: Vector) -> Hidden:
    return _weighted(pre, x).astype(x[0].dtype)


@_again
def _written(x: tuple[Hidden, ...], y: Hidden, post: Vector, res: Matrix) -> tuple[Hidden, ...]:
    weights = ((*row, write) for row, write in zip(res, post, strict=True))
    return tuple(_weighted(each, (*x, y)).astype(y.dtype) for each in weights)


def _weighted(weights: Vector, x: tuple[Hidden, ...]) -> Float[Array, "batch seq embed"]:
    pairs = zip(weights, x, strict=True)
    return total(weight[..., None] * one.astype(jnp.float32) for weight, one in pairs)


def _report(res: Matrix, context) -> None:
    """Distance of mixing matrices from doubly stochastic ones, and their entropy.

    Means over tokens and branches, of all layers and of each.
    """
    metrics = {
        "residual_row_error": doubly_stochastic.row_error(res),
        "residual_column_error": doubly_stochastic.row_error(transposed(res)),
        "residual_entropy": doubly_stochastic.entropy(res),
    }
    for name, tokens in metrics.items():
        for each in (name, name + "_{layer}"):
            context.auxiliary(each, *over_tokens(tokens, context.document))
