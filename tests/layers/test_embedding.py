"""Gradients of a table of tokens are sums by token, wherever its columns and rows are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.devices.axes import shard
from windlass.layers.embedding import Embedding

VOCAB, EMBED, LENGTH = 24, 16, 10


@pytest.mark.parametrize("rows", [8, 3])  # as many as devices share, and others
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 8, 1), (8, 1, 1)], ids=str)
def test_gradients_by_token_are_added_where_their_columns_are_stored(mesh, rows):
    random = np.random.default_rng(rows)
    tokens = random.integers(0, VOCAB, (rows, LENGTH), np.int32)
    tokens[:, ::2] = 5  # one that occurs in all rows
    d = random.normal(size=(rows, LENGTH, EMBED)).astype(np.float32)
    expected = np.zeros((VOCAB, EMBED), np.float32)
    np.add.at(expected, tokens, d)
    with tiny.on(mesh) as devices:
        made = Embedding(dict(vocab=VOCAB, embed=EMBED), key=jax.random.key(0))
        module, _ = tiny.placed(made, (), devices)
        ids = shard(jnp.asarray(tokens), "batch seq")
        weights = shard(jnp.asarray(d), "batch seq embed")

        def value(module, ids):
            return jnp.sum(module(ids) * weights)

        found = jax.jit(jax.grad(value))(module, ids).weight
    assert found.sharding.is_equivalent_to(module.weight.sharding, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
