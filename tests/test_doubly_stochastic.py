"""Doubly stochastic matrices: Sinkhorn's normalization against its definition, and exact sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from windlass.doubly_stochastic import (
    entropy,
    gain,
    matmul,
    permutation_sum,
    row_error,
    sinkhorn,
    transposed,
)

TOKENS = 512


def lanes(logits: np.ndarray):
    """Matrices [tokens, n, n], as lanes."""
    return tuple(tuple(jnp.asarray(row)) for row in logits.transpose(1, 2, 0))


def dense(matrix) -> np.ndarray:
    return np.array(matrix).transpose(2, 0, 1)


def random(std: float, n: int = 4) -> np.ndarray:
    return std * np.random.default_rng(0).normal(size=(TOKENS, n, n)).astype(np.float32)


def by_definition(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    matrix = torch.exp(logits)
    for _ in range(iterations):
        matrix = matrix / matrix.sum(dim=-2, keepdim=True)  # columns
        matrix = matrix / matrix.sum(dim=-1, keepdim=True)  # rows
    return matrix


def errors(matrix) -> tuple[float, float]:
    return float(jnp.max(row_error(matrix))), float(jnp.max(row_error(transposed(matrix))))


@pytest.mark.parametrize(("iterations", "n"), [(20, 4), (3, 3)])
def test_sinkhorn_and_its_gradient_are_those_of_the_definition(iterations, n):
    logits, weight = random(1.0, n), np.random.default_rng(1).normal(size=(TOKENS, n, n))
    theirs = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    expected = by_definition(theirs, iterations)
    (expected * torch.tensor(weight)).sum().backward()

    found, pull = jax.vjp(lambda x: sinkhorn(x, iterations), lanes(logits))
    (gradient,) = pull(lanes(weight.astype(np.float32)))
    np.testing.assert_allclose(dense(found), expected.detach(), atol=1e-6)
    assert theirs.grad is not None
    np.testing.assert_allclose(dense(gradient), theirs.grad, atol=1e-5)


def test_errors_of_sinkhorn_are_below_a_thousandth_for_logits_of_deviation_one():
    rows, columns = errors(sinkhorn(lanes(random(1.0)), 20))
    print(f"std 1, 20 iterations: rows {rows:.1e}, columns {columns:.1e}")
    assert rows < 1e-6 and columns < 1e-3


def test_the_error_of_large_logits_is_seen():
    assert errors(sinkhorn(lanes(random(8.0)), 20))[1] > 1e-2


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_values_and_gradients_are_finite_at_extreme_logits(size):
    logits = lanes((size * random(1.0)).astype(np.float32))
    six = (*logits[0], *logits[1][:2])  # one for each permutation of three
    for function, given in ((lambda x: sinkhorn(x, 20), logits), (_of_three, six)):
        found, pull = jax.vjp(function, given)
        (gradient,) = pull(jax.tree.map(lambda x: x + 1, found))
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((found, gradient)))


def _of_three(logits):
    return permutation_sum(logits, 3)


@pytest.mark.parametrize("std", [1.0, 30.0])
def test_a_sum_of_permutations_is_doubly_stochastic_for_any_logits(std):
    logits = std * np.random.default_rng(2).normal(size=(24, TOKENS)).astype(np.float32)
    found = permutation_sum(tuple(map(jnp.asarray, logits)), 4)
    assert max(errors(found)) < 1e-6
    share = np.exp(logits - logits.max(0)) / np.exp(logits - logits.max(0)).sum(0)
    expected = sum(
        each[:, None, None] * np.eye(4)[list(order)]
        for each, order in zip(share, itertools.permutations(range(4)), strict=True)
    )
    np.testing.assert_allclose(dense(found), expected, atol=1e-6)


def test_products_gains_and_entropies_are_those_of_numpy():
    a, b = random(1.0, 3), random(2.0, 3)
    np.testing.assert_allclose(dense(matmul(lanes(a), lanes(b))), a @ b, atol=1e-5)
    np.testing.assert_allclose(gain(lanes(a)), np.abs(a).sum(-1).max(-1), rtol=1e-6)
    even, one = np.full((1, 3, 3), 1 / 3, np.float32), np.eye(3, dtype=np.float32)[None]
    np.testing.assert_allclose(entropy(lanes(even)), np.log(3), rtol=1e-5)
    assert float(entropy(lanes(one))[0]) == 0
