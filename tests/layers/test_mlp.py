"""Gated MLPs compute the formulas that they are named for."""

import jax
import jax.numpy as jnp
import numpy as np

from windlass.layers import mlp


def test_silu_without_a_division_equals_that_with_one_from_end_to_end():
    x = jnp.concatenate([jnp.linspace(-100, 100, 4_001), jnp.array([-1e30, 1e30])])
    exact, slope = (jax.vmap(one)(x) for one in (jax.nn.silu, jax.grad(jax.nn.silu)))
    np.testing.assert_allclose(mlp.silu(x), exact, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(jax.vmap(jax.grad(mlp.silu))(x), slope, rtol=2e-6, atol=1e-6)
    assert mlp.silu(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
