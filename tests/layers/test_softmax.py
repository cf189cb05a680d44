"""Kernels of the head's softmax compute what plain XLA does."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from windlass.layers import softmax
from windlass.layers.softmax import Statistics

TOKENS = (2, 3, 5)


def _plain(logits, targets) -> Statistics:
    return softmax.statistics(logits, targets, jnp.float32)  # of which there is no kernel


@pytest.mark.parametrize("vocab", [256, 1000, 1025])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_kernels_equal_the_formula(monkeypatch, vocab, scale):
    monkeypatch.setattr(softmax, "LANES", 64)
    keys = jax.random.split(jax.random.key(0), 4)
    logits = scale * jax.random.normal(keys[0], (*TOKENS, vocab))
    logits = logits.astype(jnp.bfloat16).astype(jnp.float32)
    targets = jax.random.randint(keys[1], TOKENS, 0, vocab)
    d_z, d_target = (jax.random.normal(key, TOKENS) for key in keys[2:])

    def of(statistics):
        found, back = jax.vjp(lambda x: statistics(x, targets), logits)
        return found, back(Statistics(d_z, d_target, jnp.zeros(TOKENS)))[0]

    plain, d_plain = of(_plain)
    kernel, d_kernel = of(lambda x, targets: softmax.in_kernel(x, targets, True))
    for name in Statistics._fields:
        want = getattr(plain, name)
        assert jnp.allclose(getattr(kernel, name), want, rtol=1e-6, atol=1e-6), name
    # The gradient is written in the format of the logits.
    assert jnp.allclose(d_kernel, d_plain, rtol=2**-8, atol=1e-6)


def test_equal_and_very_low_logits_have_finite_statistics():
    for value in (0.0, -3e38, 3e38):
        logits = jnp.full((1, 300), value, jnp.bfloat16).astype(jnp.float32)
        found: Any = softmax.in_kernel(logits, jnp.array([7]), True)
        assert all(bool(jnp.isfinite(x).all()) for x in found)
        assert jnp.allclose(found.log_z - found.highest, jnp.log(300.0) if value == 0 else 0, 1e-5)


def test_no_gradient_flows_through_the_highest():
    logits = jnp.arange(12.0).reshape(1, 12)
    gradient = jax.grad(lambda x: _plain(x, jnp.array([3])).highest.sum())(logits)
    assert not gradient.any()
