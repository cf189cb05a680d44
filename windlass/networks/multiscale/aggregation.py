"""Aggregation of scales: y = Σ_l w_l S_l with weights on the simplex, at every position.

S_l is what attention to scale l gave. A scale takes part from the first of its cells on; before,
its weight is 0.

- `nash`: every scale answers the consensus c = Σ_m w_m S_m by its error, some rounds from equal
  weights: e_l = sqrt(mean((S_l - c)²)), w = softmax(-e / temperature). The mean is over the
  channels of one position, so that errors neither grow with the width, which would make w one-hot,
  nor see a later position. Iterates have no gradient.
- `convex`: w = softmax(θ), learned for each layer. Their entropy is an auxiliary loss, which makes
  them sparse; a sum of absolute values would be 1 on the simplex, and have no gradient.
- `adaptive`: w = softmax(W x + b), from the hidden state of each position.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from windlass.config import section
from windlass.devices.axes import Placed
from windlass.layers.auxiliary import AuxiliaryLosses, over_tokens
from windlass.layers.initializers import zeros
from windlass.layers.linear import Linear

Mixed = Float[Array, "batch seq heads head_dim"]
Weights = Float[Array, "scales batch seq"]
Seen = Bool[Array, "scales batch seq"]

READS = {"nash": ("temperature", "iterations"), "convex": ("sparsity",), "adaptive": ()}
SPARSITY = "sparsity"  # the auxiliary loss


@section
class Aggregation:
    """Weights of the scales."""

    # nash: from the errors against the consensus; convex: learned, the same at every position;
    # adaptive: from the hidden state of each position
    kind: Literal["nash", "convex", "adaptive"] = "nash"
    temperature: float | None = None  # nash: of the softmax over errors; null is 1
    iterations: int | None = None  # nash: rounds; null is 3
    sparsity: float | None = None  # convex: coefficient of the weights' entropy; null is 0.1

    shorthand: ClassVar[str] = "kind"

    def __post_init__(self):
        for name in ("temperature", "iterations", "sparsity"):
            value = getattr(self, name)
            if value is not None and name not in READS[self.kind]:
                raise ValueError(f"{name} is {value}; {self.kind} does not read it")
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; it must be 1 or more")
        if self.sparsity is not None and self.sparsity < 0:
            raise ValueError(f"sparsity is {self.sparsity}; it must be 0 or more")


class Aggregator(eqx.Module):
    """Weights of scales, and the sum of what attention to each of them gave."""

    @abstractmethod
    def weights(
        self, mixed: Sequence[Mixed], seen: Seen, x: Float[Array, "batch seq embed"], context
    ) -> Weights:
        """Weights on the simplex, in float32; 0 where a scale is not seen yet."""

    def __call__(
        self,
        mixed: Sequence[Mixed],
        seen: Seen,
        x: Float[Array, "batch seq embed"],
        context,
    ) -> Mixed:
        weights = self.weights(mixed, seen, x, context)
        _report(jax.lax.stop_gradient(weights), context)
        shares = weights.astype(x.dtype)[..., None, None]
        return reduce(jnp.add, (share * one for share, one in zip(shares, mixed, strict=True)))


class Uniform(Aggregator):
    """The mean of the scales that are seen."""

    def weights(self, mixed, seen, x, context) -> Weights:
        return _softmax(jnp.zeros(seen.shape), seen)


class Nash(Aggregator):
    """Weights by the errors of the scales against their consensus."""

    temperature: float = eqx.field(static=True)
    iterations: int = eqx.field(static=True)

    def weights(self, mixed, seen, x, context) -> Weights:
        return jax.lax.stop_gradient(
            nash(squared_distances(mixed), seen, self.temperature, self.iterations)
        )


class Convex(Aggregator, Placed, AuxiliaryLosses):
    """Learned weights, made sparse by a penalty on their entropy."""

    logits: Float[Array, "*layers scales"]
    sparsity: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, scales: int, sparsity: float):
        self.logits, self.sparsity = jnp.zeros(scales), sparsity

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"logits": ("scales",)}

    @property
    def losses(self) -> dict[str, float]:
        return {SPARSITY: self.sparsity}

    def weights(self, mixed, seen, x, context) -> Weights:
        tokens = jnp.sum(context.document >= 0).astype(jnp.float32)
        entropy = jnp.sum(entr(jax.nn.softmax(self.logits)))
        context.auxiliary(SPARSITY, tokens * entropy, tokens)
        return _softmax(self.logits[:, None, None], seen)


class Adaptive(Aggregator):
    """A gate: weights from the hidden state of each position, equal at first."""

    gate: Linear

    def __init__(self, sizes: dict[str, int], scales: int, *, key: PRNGKeyArray):
        wide = sizes | {"scales": scales}
        self.gate = Linear("embed", "scales", wide, bias=True, initializer=zeros, key=key)

    def weights(self, mixed, seen, x, context) -> Weights:
        return _softmax(jnp.moveaxis(self.gate(x).astype(jnp.float32), -1, 0), seen)


def aggregator(
    about: Aggregation | None, scales: int, sizes: dict[str, int], *, key: PRNGKeyArray
) -> Aggregator:
    """The aggregator that a config names; None is the mean."""
    if about is None:
        return Uniform()
    if about.kind == "convex":
        return Convex(scales, 0.1 if about.sparsity is None else about.sparsity)
    if about.kind == "adaptive":
        return Adaptive(sizes, scales, key=key)
    return Nash(about.temperature or 1.0, about.iterations or 3)


def nash(
    distances: Float[Array, "scales scales batch seq"],
    seen: Seen,
    temperature: float,
    iterations: int,
) -> Weights:
    """Weights after some rounds of w = softmax(-e / temperature), from equal ones.

    The errors follow from mean squares d_lm of S_l - S_m alone: where w sums to 1,

        e_l² = mean((S_l - c)²) = Σ_m w_m d_lm - ½ Σ_mn w_m w_n d_mn

    so that rounds cost a few numbers a position, and channels are read, and summed over devices,
    once.
    """
    weights = _softmax(jnp.zeros(seen.shape), seen)
    for _ in range(iterations):
        to_all = jnp.sum(weights * distances, axis=1)
        squares = to_all - 0.5 * jnp.sum(weights * to_all, axis=0)
        weights = _softmax(-jnp.sqrt(jnp.maximum(squares, 0)) / temperature, seen)
    return weights


def squared_distances(mixed: Sequence[Mixed]) -> Float[Array, "scales scales batch seq"]:
    """Mean over channels of (S_l - S_m)², for every two scales, in float32."""
    whole = [one.astype(jnp.float32) for one in mixed]
    pairs = {
        (i, j): jnp.mean(jnp.square(whole[i] - whole[j]), axis=(2, 3))
        for i in range(len(whole))
        for j in range(i)
    }
    none, every = jnp.zeros_like(pairs[1, 0]), range(len(whole))
    rows = [[pairs.get((max(i, j), min(i, j)), none) for j in every] for i in every]
    return jnp.stack([jnp.stack(row) for row in rows])


def _softmax(logits: Array, seen: Seen) -> Weights:
    """Softmax over the scales that are seen, of which the finest always is."""
    return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=0)


def _report(weights: Weights, context) -> None:
    """Distance of the weights from the simplex, and their entropy, as means over tokens."""
    metrics = {
        "aggregation_simplex_error": jnp.abs(jnp.sum(weights, axis=0) - 1),
        "aggregation_entropy": jnp.sum(entr(weights), axis=0),
    }
    for name, tokens in metrics.items():
        for each in (name, name + "_{layer}"):
            context.auxiliary(each, *over_tokens(tokens, context.document))
