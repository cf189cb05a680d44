"""Adafactor: second moments of a matrix from its rows' and its columns'.

https://arxiv.org/abs/1804.04235. That of optax factors the two longest axes of an array and takes
one size for all of it, which in a stack of layers mixes layers. Here each layer's matrix is one,
and several axes that are read or written together are one side of it.
"""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from windlass import optim
from windlass.config import section
from windlass.devices.axes import ArrayFacts, annotate
from windlass.optim import Descent

EPS = 1e-30  # added to squares: the gradient of a token that does not occur is zero
SMALLEST = 1e-3  # the size that a smaller weight is taken to have: one of zeros must move


class FactoredMoments(NamedTuple):
    """The means of squares. Axes that are averaged over stay, with size 1, so that they are placed.

    What is no matrix has no columns, and `rows` are whole.
    """

    count: Int[Array, ""]
    rows: PyTree
    columns: PyTree


@section
class Rule(optim.Rule):
    """Adafactor: the gradient over the root of a rank-one estimate of the mean of squares.

    V ≈ R Cᵀ / mean(R), of the means R over rows and C over columns of g² + ε, each
    x ← (1 - t^-decay) x + t^-decay · new at update t. The direction g / √V is scaled down to the
    root mean square `threshold`, and where it is `relative` times that of the weights.
    """

    decay: float = 0.8  # second-moment decay: 1 - 1 / t^decay at update t
    threshold: float = 1.0  # update clipping: the largest RMS of an update
    relative: bool = True  # scale the learning rate by the RMS of each matrix

    sizes: ClassVar[tuple[str, ...]] = ("decay", "threshold")

    def direction(self) -> optax.GradientTransformation:
        def start(params):
            zeros = jax.tree.map(jnp.zeros_like, params)
            return FactoredMoments(jnp.int32(0), _rows(zeros), _columns(zeros))

        def update(updates, state, params=None):
            new = (state.count + 1.0) ** -self.decay

            def mix(old, now):
                return (1 - new) * old + new * now

            squares = jax.tree.map(lambda g: g**2 + EPS, updates)
            rows = jax.tree.map(mix, state.rows, _rows(squares))
            columns = jax.tree.map(mix, state.columns, _columns(squares))

            is_matrix = _factored(updates)
            direction = jax.tree.map(_over_root, updates, rows)
            tall, flat = eqx.partition(direction, is_matrix)
            # The square of an entry is its row's mean times its column's over the mean of all.
            all_means = _column_means(eqx.filter(rows, is_matrix))
            shares = jax.tree.map(jnp.divide, columns, all_means)
            direction = eqx.combine(jax.tree.map(_over_root, tall, shares), flat)

            def scaled(d, size, weight_size):
                limited = d / jnp.maximum(1.0, size / self.threshold)
                return limited * jnp.maximum(SMALLEST, weight_size) if self.relative else limited

            sizes = annotate(direction, _size), annotate(params, _size)
            direction = jax.tree.map(scaled, direction, *sizes)
            return direction, FactoredMoments(state.count + 1, rows, columns)

        return optax.GradientTransformation(start, update)


@section
class Optimizer(Rule, Descent):
    """Adafactor: hardly more memory than the weights."""


def _sides(about: ArrayFacts) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The axes of a matrix that are its rows, and those that are its columns; None of no matrix."""
    if not about.is_matrix or len(about.axes) < 2:
        return None
    axes, reads = _own(about), about.reads or 1
    return axes[:reads], axes[reads:]


def _own(about: ArrayFacts) -> tuple[int, ...]:
    """The axes of an array but for those of a stack of layers."""
    return tuple(range(-len(about.axes), 0))


def _factored(tree: PyTree) -> PyTree:
    return annotate(tree, lambda x, about: _sides(about) is not None)


def _rows(squares: PyTree) -> PyTree:
    """The mean of each row of a matrix; what is no matrix as it is."""

    def mean(x, about):
        sides = _sides(about)
        return x if sides is None else jnp.mean(x, sides[1], keepdims=True)

    return annotate(squares, mean)


def _columns(squares: PyTree) -> PyTree:
    return _column_means(eqx.filter(squares, _factored(squares)))


def _column_means(matrices: PyTree) -> PyTree:
    def mean(x, about):
        sides = _sides(about)
        assert sides is not None
        return jnp.mean(x, sides[0], keepdims=True)

    return annotate(matrices, mean)


def _over_root(x: Array, square: Array) -> Array:
    return x * jax.lax.rsqrt(square)


def _size(x: Array, about: ArrayFacts) -> Array:
    """The root mean square of each layer's own array."""
    return jnp.sqrt(jnp.mean(x**2, _own(about) or None, keepdims=True))
