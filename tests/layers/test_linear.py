"""Linear maps: products of tokens in any number of axes, and their gradients."""

import jax
import jax.numpy as jnp
import pytest

from windlass.layers.linear import Linear

SIZES = {"embed": 64, "heads": 4, "head_dim": 16, "mlp": 128}


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("axes", [("embed", "heads head_dim"), ("heads head_dim", "embed")])
def test_every_token_is_multiplied_by_the_matrix(leading: tuple[int, ...], axes: tuple[str, str]):
    linear = Linear(*axes, SIZES, key=jax.random.key(0))
    read = tuple(SIZES[name] for name in linear.reads)
    x = jax.random.normal(jax.random.key(1), leading + read)
    expected = jnp.tensordot(x, linear.weight, axes=len(read))
    assert linear(x).shape == expected.shape
    assert jnp.allclose(linear(x), expected, atol=1e-5)


def test_a_gradient_is_computed_without_transposed_copies():
    linear = Linear("embed", "mlp", SIZES, key=jax.random.key(0))

    def total(weight, x):
        y = Linear.of(linear.reads, linear.writes, weight)(jnp.tanh(x))
        return jnp.sum(jnp.sin(y))

    x = jnp.ones((4, 32, 64))
    program = jax.jit(jax.grad(total, argnums=(0, 1))).lower(linear.weight, x).compile()
    text = str(program.as_text())
    assert " transpose(" not in text
    assert " copy(" not in text
