"""The hash of consumed tokens: any other token, row or order gives another."""

import jax.numpy as jnp
import numpy as np
import pytest

from windlass.program import token_hash

BATCHES = np.random.default_rng(0).integers(1000, size=(3, 4, 6)).astype(np.int32)


def hashed(batches: np.ndarray) -> int:
    found = token_hash.none()
    for tokens in batches:
        found = token_hash.with_batch(found, {"tokens": jnp.asarray(tokens)}, ["tokens"])
    return int(found)


def computed(batches: np.ndarray) -> int:
    """The same in Python's own numbers."""
    whole = 2**32 - 1

    def murmur(x: int) -> int:
        x = ((x ^ x >> 16) * 0x85EBCA6B) & whole
        x = ((x ^ x >> 13) * 0xC2B2AE35) & whole
        return x ^ x >> 16

    found = 0
    for tokens in batches:
        batch = 0
        for index, token in enumerate(tokens.ravel().tolist()):
            batch += murmur(token ^ (index * 0x9E3779B1 + 0x7F4A7C15) & whole)
        found = (found * 0x9E3779B1 + 0x7F4A7C15 ^ batch) & whole
        found = ((found ^ found >> 16) * 0x85EBCA6B) & whole
        found ^= found >> 13
    return found


def test_the_hash_is_the_one_that_is_described():
    assert hashed(BATCHES) == computed(BATCHES)


@pytest.mark.parametrize("what", ["a token", "two rows", "two batches", "a batch less"])
def test_the_hash_changes_with_every_token_and_every_order(what):
    others = BATCHES.copy()
    if what == "a token":
        others[0, 3, 5] ^= 1
    elif what == "two rows":
        others[1, [0, 1]] = others[1, [1, 0]]
    elif what == "two batches":
        others = others[[1, 0, 2]]
    else:
        others = others[:2]
    assert hashed(others) != hashed(BATCHES)


def test_the_hash_is_over_the_columns_that_are_named_whatever_their_axes_and_types():
    batch = {
        "tokens": jnp.asarray(BATCHES[0]),
        "puzzle": jnp.arange(4, dtype=jnp.int32),
        "logits": jnp.arange(24, dtype=jnp.float16).reshape(4, 3, 2),
    }

    def after(batch: dict, *names: str) -> int:
        return int(token_hash.with_batch(token_hash.none(), batch, names))

    assert after(batch, "tokens") == hashed(BATCHES[:1])
    found = after(batch, "tokens", "puzzle", "logits")
    assert found != after(batch, "puzzle", "tokens", "logits")
    for name in batch:
        other = batch | {name: batch[name].at[3].set(batch[name][0])}
        assert after(other, "tokens", "puzzle", "logits") != found
        assert (after(other, "tokens", "puzzle") == after(batch, "tokens", "puzzle")) == (
            name == "logits"
        )
