"""Muon: the momentum of a matrix, turned so that it stretches nothing.

https://kellerjordan.github.io/posts/muon, sized as in https://arxiv.org/abs/2502.16982. That of
optax corrects a bias that its author's does not, and multiplies matrices where they lie, which a
mesh of explicit axes refuses.
"""

import math
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from windlass import optim
from windlass.config import section
from windlass.devices.axes import ArrayFacts, annotate
from windlass.optim import Descent, Moment

# A quintic that takes singular values from near 0 to about 1 in few steps; from 0.7 to 1.2 they
# only swing about it, which does no harm.
QUINTIC = (3.4445, -4.7750, 2.0315)
SIZE = 0.2  # the root mean square of an update: about AdamW's, so that its rates and decay serve


class MuonState(NamedTuple):
    momentum: PyTree  # of the matrices between hidden states
    adam: optax.OptState  # of everything else


@section
class Adam:
    """AdamW for what is no matrix between hidden states: embeddings, head, norms, biases."""

    learning_rate: float | None = None  # peak; null: that of the matrices
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the denominator

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a share, below 1")


@section
class Rule(optim.Rule):
    """Muon: the momentum of a matrix, made orthogonal; AdamW where it is no map of hidden states.

    M ← μ M + (1 - μ) G gives the direction 0.2 √max(rows, columns) · U Vᵀ, of the singular value
    decomposition U Σ Vᵀ of μ M + (1 - μ) G (Nesterov's), found by Newton and Schulz's iteration
    X ← aX + (bXXᵀ + c(XXᵀ)²) X.
    """

    momentum: float = 0.95  # decay of the momentum
    iterations: int = 5  # Newton-Schulz iterations
    moment: Moment = "float32"  # dtype of momentum and first moment
    adamw: Adam = Adam()

    shares: ClassVar[tuple[str, ...]] = ("momentum",)
    sizes: ClassVar[tuple[str, ...]] = ("iterations",)

    def rates(self, weights: PyTree, peak: float) -> list[tuple[str, float]]:
        rest = "adamw", self.adamw.learning_rate or peak
        between = jax.tree.leaves(_between_states(weights))
        return [("muon", peak) if is_one else rest for is_one in between]

    def direction(self) -> optax.GradientTransformation:
        a = self.adamw
        adam = optax.scale_by_adam(a.beta1, a.beta2, a.eps, mu_dtype=self.moment)

        def start(params):
            matrices, rest = eqx.partition(params, _between_states(params))
            return MuonState(optax.tree.zeros_like(matrices, dtype=self.moment), adam.init(rest))

        def mix(old, new):
            return self.momentum * old + (1 - self.momentum) * new

        def update(updates, state, params=None):
            matrices, rest = eqx.partition(updates, _between_states(updates))
            momentum = jax.tree.map(mix, state.momentum, matrices)
            ahead = jax.tree.map(mix, momentum, matrices)  # Nesterov's
            turned = annotate(ahead, self._turned)
            others, adams = adam.update(rest, state.adam)
            stored = optax.tree.cast(momentum, self.moment)
            return eqx.combine(turned, others), MuonState(stored, adams)

        return optax.GradientTransformation(start, update)

    def _turned(self, x: Float[Array, "..."], about: ArrayFacts) -> Float[Array, "..."]:
        """Each layer's matrix, orthogonal; axes that are read or written together are one side."""
        assert about.reads is not None
        stacked = x.ndim - len(about.axes)
        shape, layers = x.shape[stacked:], x.shape[:stacked]
        rows, columns = math.prod(shape[: about.reads]), math.prod(shape[about.reads :])
        way, more = stations(x, stacked)
        x = jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if more else x
        for spec in way[1:]:
            x = jax.sharding.reshard(x, spec)
        flat = orthogonal(x.reshape(-1, rows, columns), self.iterations)
        x = SIZE * math.sqrt(max(rows, columns)) * flat.reshape(x.shape)
        for spec in reversed(way[:-1]):
            x = jax.sharding.reshard(x, spec)
        return x[: layers[0]] if more else x


@section
class Optimizer(Rule, Descent):
    """Muon for the matrices between hidden states, AdamW for the rest."""


def orthogonal(
    x: Float[Array, "layers rows columns"], iterations: int
) -> Float[Array, "layers rows columns"]:
    """Each matrix with its singular values taken to about 1: Newton and Schulz's iteration."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT, iterations).mT
    a, b, c = QUINTIC
    x = x / jnp.maximum(jnp.sqrt(jnp.sum(x**2, (1, 2), keepdims=True)), 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _between_states(tree: PyTree) -> PyTree:
    return annotate(tree, lambda x, about: about.reads is not None)


def stations(x: Array, stacked: int) -> tuple[list[PartitionSpec], int]:
    """Shardings of an array, from where it lives to one in which every matrix in it is whole.

    A mesh axis that splits the matrices comes to split the layers in front of them, so that each
    device turns some; the second result is how many layers of zeros are needed for as many on each.
    A matrix that is no layer of a stack is whole on every device. One axis at a time: that is an
    all-to-all, where for all at once the compiler would all-gather the whole array.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return [PartitionSpec()], 0
    spec = [*jax.typeof(x).sharding.spec]
    specs, on_layers = [PartitionSpec(*spec)], ()
    for axis in range(stacked, x.ndim):
        names = spec[axis] or ()
        if not names:
            continue
        spec[axis] = None
        if stacked:
            on_layers += names if isinstance(names, tuple) else (names,)
            spec[0] = on_layers
        specs.append(PartitionSpec(*spec))
    devices = math.prod(mesh.shape[name] for name in on_layers)
    return specs, -x.shape[0] % devices
