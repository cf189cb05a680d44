"""Multiscale models: no sight of the future, learning, sizes and refusals."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.config import read, tree
from windlass.errors import UserError
from windlass.layers.kv_cache import KVCache
from windlass.models.llama import Config as Llama
from windlass.models.multiscale import Config
from windlass.networks.multiscale.aggregation import Aggregation
from windlass.networks.multiscale.decomposition import Convolution, Downsampling, joined

long = pytest.mark.long
AGGREGATIONS = [*(Aggregation(kind=kind) for kind in ("nash", "convex", "adaptive")), None]
SMALL = Config(vocab=16, embed=64, mlp=128, layers=2, heads=4, scales=3, theta=1e4)


class Symmetric(Downsampling):
    """A convolution padded on both sides, as the original has it: it reads one input ahead."""

    causal: Convolution
    kernel: int = eqx.field(static=True)
    stride: int = eqx.field(static=True)

    def __call__(self, x, context):
        ahead = jnp.roll(joined(x), -1, axis=1).at[:, -1].set(0)
        return self.causal(ahead.reshape(x.shape), context)


def symmetric(model):
    is_one = lambda node: isinstance(node, Convolution)  # noqa: E731
    swap = lambda node: Symmetric(node, node.kernel, node.stride) if is_one(node) else node  # noqa: E731
    return jax.tree.map(swap, model, is_leaf=is_one)


# No sight of the future


def first_changed(model, length: int) -> list[int]:
    """The first position whose hidden state moves by 1e-4 when a token is changed, for each."""
    tokens = jnp.asarray(tiny.documents(16, [length])[0])
    changed = jnp.tile(tokens, (length + 1, 1))
    changed = changed.at[jnp.arange(length), jnp.arange(length)].add(1) % 16
    batch = {
        "tokens": changed,
        "position": jnp.tile(jnp.arange(length), (length + 1, 1)),
        "document": jnp.zeros((length + 1, length), jnp.int32),
    }
    hidden = np.asarray(eqx.filter_jit(lambda batch: model(batch)[0])(batch))
    moved = np.abs(hidden[:-1] - hidden[-1]).max(axis=-1) > 1e-4
    return moved.argmax(axis=1).tolist()


@pytest.mark.parametrize("length", [13, pytest.param(27, marks=long)])
@pytest.mark.parametrize("scales", [4, *(pytest.param(n, marks=long) for n in (2, 3))])
@pytest.mark.parametrize(
    "aggregation", [AGGREGATIONS[0], *(pytest.param(one, marks=long) for one in AGGREGATIONS[1:])]
)
def test_a_changed_token_moves_no_state_before_it_at_any_scale(aggregation, scales, length):
    config = dataclasses.replace(SMALL, aggregation=aggregation, scales=scales)
    assert first_changed(tiny.made(config), length) == list(range(length))


@pytest.mark.parametrize("aggregation", [pytest.param(one, marks=long) for one in AGGREGATIONS])
def test_padding_on_both_sides_is_seen_by_the_probe(aggregation):
    config = dataclasses.replace(SMALL, aggregation=aggregation)
    found = first_changed(symmetric(tiny.made(config)), 13)
    assert any(first < token for token, first in enumerate(found)), found


def loss_on_independent_tokens(config: Config, leak=lambda model: model) -> float:
    """Loss, over ln V, on tokens that nothing predicts, after training on such tokens."""
    weights, static = eqx.partition(leak(config.init(jax.random.key(0))), eqx.is_array)

    def loss(weights, key):
        tokens = jax.random.randint(key, (8, 65), 0, config.vocab)
        return tiny.whole_loss(eqx.combine(weights, static), rows(tokens))

    return tiny.loss_after(loss, weights, rate=3e-3, steps=200) / math.log(config.vocab)


def rows(tokens: jax.Array) -> dict[str, jax.Array]:
    """One document a row."""
    inputs = tokens[:, :-1]
    return {
        "tokens": inputs,
        "targets": tokens[:, 1:],
        "weight": jnp.ones(inputs.shape),
        "position": jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape),
        "document": jnp.zeros(inputs.shape, jnp.int32),
    }


@long
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_is_learned_of_independent_tokens(aggregation):
    share = loss_on_independent_tokens(dataclasses.replace(SMALL, aggregation=quiet(aggregation)))
    print(f"{aggregation}: {share:.4f} of ln V")
    assert share >= 0.98


@long
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_padding_on_both_sides_is_learned_from_independent_tokens(aggregation):
    config = dataclasses.replace(SMALL, aggregation=quiet(aggregation))
    share = loss_on_independent_tokens(config, symmetric)
    print(f"{aggregation}, padded on both sides: {share:.4f} of ln V")
    assert share < 0.9


def quiet(aggregation: Aggregation | None) -> Aggregation | None:
    """Without its penalty, which is no loss on tokens."""
    if aggregation is None or aggregation.kind != "convex":
        return aggregation
    return dataclasses.replace(aggregation, sparsity=0.0)


# Learning


def after_two(key: jax.Array, count: int, length: int) -> jax.Array:
    """Texts of a language of 16 letters, of which the last two decide about the next."""
    tables = 2.0 * jax.random.normal(jax.random.key(7), (2, 16, 16))
    start, draws = jax.random.split(key)

    def step(last, key):
        logits = tables[0][last[0]] + tables[1][last[1]]
        new = jax.random.categorical(key, logits)
        return (last[1], new), new

    first = jax.random.randint(start, (2, count), 0, 16)
    _, tokens = jax.lax.scan(step, (first[0], first[1]), jax.random.split(draws, length))
    return tokens.T


@functools.cache
def learned(config) -> float:
    weights, static = eqx.partition(config.init(jax.random.key(0)), eqx.is_array)

    def loss(weights, key):
        return tiny.loss(eqx.combine(weights, static), rows(after_two(key, 16, 65)))

    return tiny.loss_after(loss, weights, rate=3e-3, steps=300)


@long
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_language_of_order_two_is_learned_as_by_a_plain_transformer(aggregation):
    sizes = {name: getattr(SMALL, name) for name in ("vocab", "embed", "mlp", "layers", "heads")}
    plain = Llama(**sizes, kv_heads=4, head_dim=16, theta=SMALL.theta)
    ours, theirs = learned(dataclasses.replace(SMALL, aggregation=aggregation)), learned(plain)
    print(f"{aggregation}: {ours:.4f}, a plain transformer {theirs:.4f}")
    assert ours <= 1.1 * theirs


# Generation


@long
@pytest.mark.parametrize(
    ("aggregation", "decomposition"),
    [
        *((aggregation, "convolution") for aggregation in AGGREGATIONS),
        *((AGGREGATIONS[0], pool) for pool in ("max_pool", "average_pool")),
    ],
)
def test_a_cache_per_scale_gives_what_a_whole_pass_does(aggregation, decomposition):
    form = dict(aggregation=aggregation, decomposition=decomposition, scales=4)
    model = tiny.made(dataclasses.replace(SMALL, **form))
    # Embeddings of about 1, as what layers add: beside smaller ones a row alone and the same row
    # beside two others are further apart than 1e-5, by rounding.
    model = eqx.tree_at(lambda model: model.embedding.weight, model, replace_fn=lambda x: 10 * x)
    tokens = jnp.asarray(np.stack(tiny.documents(16, [24] * 3)))
    whole = rows(tokens)
    expected = eqx.filter_jit(lambda batch: model(batch)[0])(whole)
    step = eqx.filter_jit(lambda batch, cache: model(batch, cache)[::2])
    cache, found, at = KVCache.empty(3, 23), [], 0
    for chunk in (9, 1, 1, 5, 1, 1, 1, 4):
        part = {name: column[:, at : at + chunk] for name, column in whole.items()}
        hidden, cache = step(part, cache)
        found.append(hidden)
        at += chunk
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("embed", 70, "is 70; it must be a multiple of 8, as heads (4) have an even size: 72"),
        ("heads", 0, "is 0; it must be 1 or more"),
        ("scales", 1, "is 1; it must be 2 or more"),
        ("stride", 1, "is 1; it must be 2 or more"),
        ("kernel", 0, "is 0; it must be 1 or more"),
        ("theta", 1.0, "is 1.0; it must be above 1"),
        ("decomposition", "conv", 'is "conv"; it must be convolution, average_pool or max_pool'),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_key(field, value, what):
    with pytest.raises(UserError) as error:
        read(Config, tree(SMALL) | {field: value})
    assert str(error.value).startswith(f"1 problem in the recipe:\n  {field}  {what}")
