"""What is computed in float32 even where a model computes in bfloat16."""

import jax
import jax.numpy as jnp

from windlass.layers.embedding import Embedding
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary


def test_gradients_of_a_token_that_occurs_often_are_added_in_float32():
    embedding = Embedding(dict(vocab=3, embed=4), key=jax.random.key(0))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), embedding)
    tokens = jnp.ones((10, 100), jnp.int32)
    gradient = jax.grad(lambda model: jnp.sum(model(tokens).astype(jnp.float32)))(low)
    assert gradient.weight.dtype == jnp.bfloat16
    assert gradient.weight.tolist() == [[0] * 4, [1000] * 4, [0] * 4]  # in bfloat16 256 + 1 is 256


def test_neighbouring_positions_far_into_a_document_are_told_apart():
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    rotary = Rotary(1e4)
    first, second = rotary(x, jnp.array([[256, 257]], jnp.int32))[0]
    exact = rotary(x.astype(jnp.float32), jnp.array([[257, 257]], jnp.int32))[0, 0]
    assert not jnp.array_equal(first, second)
    assert jnp.allclose(second.astype(jnp.float32), exact, atol=2e-2)


def test_a_norm_of_large_and_small_numbers_does_not_lose_the_small():
    norm = RMSNorm("embed", dict(embed=1025), eps=1e-6)
    x = jnp.concatenate([jnp.full(1, 16.0), jnp.full(1024, 0.5)])  # squares: 256, and 1024 of 1/4
    low = norm(x.astype(jnp.bfloat16))
    assert low.dtype == jnp.bfloat16
    assert jnp.allclose(low.astype(jnp.float32), x / jnp.sqrt(512 / 1025), rtol=1e-2)
