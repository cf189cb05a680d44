"""Doubly stochastic matrices, one for every token: rows and columns of shares that sum to 1.

Small matrices lie token by token in an array for each entry ("lanes"), so that the n² numbers of a
matrix are never the minor axis of an array, and all iterations are one elementwise function.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Lane = Float[Array, "..."]
Vector = tuple[Lane, ...]
Matrix = tuple[Vector, ...]  # its rows

DEEPEST = -40.0  # logits that are further below the largest of a column count as this far

_zip = partial(zip, strict=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sinkhorn(logits: Matrix, iterations: int) -> Matrix:
    """Sinkhorn and Knopp's normalization, with a gradient of its own."""
    return sinkhorn_values(logits, iterations)


def sinkhorn_values(logits: Matrix, iterations: int) -> Matrix:
    """Sinkhorn and Knopp's normalization of K = exp(logits), columns and then rows, in turns.

    P = diag(u) K diag(v), where v ← 1 / Kᵀu and u ← 1 / Kv, from u = 1. Rows of P sum to 1, columns
    do in the limit. The scale of a column of K does not matter, so its largest entry is 1; the
    least is e^-40, which leaves u, v and their gradients in the range of float32 for any logits.
    """
    kernel, ones = _kernel(logits), _ones(logits)
    once = lambda _, now: _iteration(kernel, now[0])  # noqa: E731
    u, v = jax.lax.fori_loop(0, iterations, once, (ones, ones))
    return _scaled(u, kernel, v)


def sinkhorn_gradient(
    iterations: int, logits: Matrix, gradient: Matrix, scan: Callable[..., Any] = jax.lax.scan
) -> Matrix:
    """Gradient of the logits through every iteration; they are computed again, by `scan`.

    It is that of log u, log K and log v: the derivatives of log u = −log Kv are the entries of
    −diag(u) K diag(v), those of log v alike, and none of them is above 1.
    """
    kernel, ones = _kernel(logits), _ones(logits)
    again = lambda now, _: (_iteration(kernel, now[0]), now[0])  # noqa: E731
    (u, v), befores = scan(again, (ones, ones), None, length=iterations)
    of_kernel = _map(jnp.multiply, gradient, _scaled(u, kernel, v))

    def back(now, before):
        of_kernel, of_u, of_v, u = now
        v = _reciprocals(transposed(kernel), before)
        by_u = tuple(tuple(d * x for x in row) for d, row in _zip(of_u, _scaled(u, kernel, v)))
        of_v = tuple(d - total(column) for d, column in _zip(of_v, transposed(by_u)))
        by_v = tuple(tuple(d * x for d, x in _zip(of_v, row)) for row in _scaled(before, kernel, v))
        of_kernel = _map(lambda a, b, c: a - b - c, of_kernel, by_u, by_v)
        nothing = tuple(map(jnp.zeros_like, of_v))
        return (of_kernel, tuple(-total(row) for row in by_v), nothing, before), None

    of_u, of_v = (tuple(map(total, lines)) for lines in (of_kernel, transposed(of_kernel)))
    last = (of_kernel, of_u, of_v, u)
    (of_kernel, *_), _ = scan(back, last, befores, length=iterations, reverse=True)
    return _map(lambda x, d: jnp.where(x > DEEPEST, d, 0), _below(logits), of_kernel)


sinkhorn.defvjp(
    lambda logits, iterations: (sinkhorn(logits, iterations), logits),
    lambda iterations, logits, gradient: (sinkhorn_gradient(iterations, logits, gradient),),
)


def permutation_sum(logits: Sequence[Lane], n: int) -> Matrix:
    """Σ_p softmax(logits)_p P_p over all n! permutations of n, the identity first.

    Every doubly stochastic matrix is such a sum (Birkhoff and von Neumann), and each is one.
    """
    largest = jax.lax.stop_gradient(reduce(jnp.maximum, logits))
    sizes = [jnp.exp(x - largest) for x in logits]
    norm = 1 / total(sizes)
    shares = list(_zip(permutations(range(n)), [x * norm for x in sizes]))
    return tuple(
        tuple(total(share for order, share in shares if order[i] == j) for j in range(n))
        for i in range(n)
    )


def matmul(a: Matrix, b: Matrix) -> Matrix:
    columns = transposed(b)
    return tuple(tuple(_dot(row, column) for column in columns) for row in a)


def transposed(matrix: Matrix) -> Matrix:
    return tuple(_zip(*matrix))


def total(lanes: Iterable[Lane]) -> Lane:
    return reduce(jnp.add, lanes)


def gain(matrix: Matrix) -> Lane:
    """Largest sum of a row's absolute values: what a matrix can stretch a vector by."""
    return reduce(jnp.maximum, [total(map(jnp.abs, row)) for row in matrix])


def row_error(matrix: Matrix) -> Lane:
    """Largest distance of a row's sum from 1."""
    return reduce(jnp.maximum, [jnp.abs(total(row) - 1) for row in matrix])


def entropy(matrix: Matrix) -> Lane:
    """Mean entropy of rows, in nats: 0 of permutations, log n where everything is averaged."""
    parts = [-x * jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).tiny)) for row in matrix for x in row]
    return total(parts) / len(matrix)


def _iteration(kernel: Matrix, u: Vector) -> tuple[Vector, Vector]:
    v = _reciprocals(transposed(kernel), u)
    return _reciprocals(kernel, v), v


def _reciprocals(matrix: Matrix, vector: Vector) -> Vector:
    """1 / (matrix · vector)."""
    return tuple(1 / _dot(row, vector) for row in matrix)


def _kernel(logits: Matrix) -> Matrix:
    return _map(lambda x: jnp.exp(jnp.maximum(x, DEEPEST)), _below(logits))


def _below(logits: Matrix) -> Matrix:
    """Logits as their distance from the largest in their column."""
    largest = [reduce(jnp.maximum, column) for column in transposed(logits)]
    return tuple(tuple(x - top for x, top in _zip(row, largest)) for row in logits)


def _scaled(u: Vector, kernel: Matrix, v: Vector) -> Matrix:
    """diag(u) K diag(v)."""
    return tuple(tuple(a * x * b for x, b in _zip(row, v)) for a, row in _zip(u, kernel))


def _map(function: Callable, *matrices: Matrix) -> Matrix:
    return tuple(tuple(map(function, *rows)) for rows in _zip(*matrices))


def _dot(a: Vector, b: Vector) -> Lane:
    return total(x * y for x, y in _zip(a, b))


def _ones(logits: Matrix) -> Vector:
    return tuple(jnp.ones_like(row[0]) for row in logits)
