"""Weights of scales: on the simplex, causal, finite, and mixed at any width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.config import read, tree
from windlass.errors import UserError
from windlass.layers.context import Packed
from windlass.networks.multiscale.aggregation import (
    Adaptive,
    Aggregation,
    Convex,
    Nash,
    Uniform,
    aggregator,
    squared_distances,
)

SIZES = {"embed": 16}
SHAPE = (2, 7, 4, 4)  # of a scale: rows, positions, heads, channels of each
FRAME = {"position": jnp.tile(jnp.arange(7), (2, 1)), "document": jnp.zeros((2, 7), jnp.int32)}
SEEN = jnp.ones((3, 2, 7), bool)
X = jnp.asarray(np.random.default_rng(9).normal(size=(2, 7, 16)).astype(np.float32))


def scales(shape=SHAPE, count: int = 3, seed: int = 0) -> list[jax.Array]:
    """Scales of which the second is another than the first and the last, which are close."""
    first, second, more, *_ = np.random.default_rng(seed).normal(size=(3, *shape))
    each = [first, second, first + 0.3 * more][:count]
    return [jnp.asarray(one.astype(np.float32)) for one in each]


def trained(kind: Any):
    """An aggregator whose learned weights are not those it starts with."""
    about = None if kind is None else Aggregation(kind=kind)
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: x + rng.normal(size=x.shape).astype(np.float32),
        aggregator(about, 3, SIZES, key=jax.random.key(0)),
    )


KINDS = ["nash", "convex", "adaptive", None]


def weights_of(kind, mixed, seen=SEEN, x=X) -> np.ndarray:
    return np.asarray(trained(kind).weights(mixed, seen, x, Packed(FRAME)))


def by_definition(mixed, temperature: float, iterations: int) -> np.ndarray:
    """Nash weights as they are defined, from errors against the consensus itself."""
    whole = np.stack([np.asarray(one, np.float64) for one in mixed])
    weights = np.full(whole.shape[:3], 1 / len(whole))
    for _ in range(iterations):
        consensus = (weights[..., None, None] * whole).sum(axis=0)
        errors = np.sqrt(((whole - consensus) ** 2).mean(axis=(3, 4)))
        weights = np.exp(-errors / temperature)
        weights /= weights.sum(axis=0)
    return weights


@pytest.mark.parametrize(("temperature", "iterations"), [(1.0, 3), (0.3, 5)])
def test_weights_of_the_game_are_those_of_its_definition(temperature, iterations):
    found = Nash(temperature, iterations).weights(scales(), SEEN, X, Packed(FRAME))
    np.testing.assert_allclose(found, by_definition(scales(), temperature, iterations), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_on_the_simplex_and_of_scales_that_are_seen(kind):
    seen = SEEN.at[1:, :, :2].set(False).at[2, :, :4].set(False)
    found = weights_of(kind, scales(), seen)
    assert found.min() >= 0
    np.testing.assert_allclose(found.sum(axis=0), 1, atol=1e-5)
    assert (found[~np.asarray(seen)] == 0).all() and (found[np.asarray(seen)] > 0).all()


def test_identical_scales_have_equal_weights_and_finite_gradients():
    same = scales()[0]

    def total(mixed):
        return jnp.sum(jnp.square(Nash(1.0, 3)(mixed, SEEN, X, Packed(FRAME))))

    found = weights_of("nash", [same] * 3)
    np.testing.assert_allclose(found, 1 / 3, atol=1e-5)
    for leaf in jax.grad(total)([same] * 3):  # where the slope of a square root is infinite
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


@pytest.mark.parametrize(
    ("kind", "dtype"), [("nash", "float32"), *((kind, "bfloat16") for kind in KINDS)]
)
def test_sums_have_the_dtype_of_scales_and_are_finite_with_their_gradient(kind, dtype):
    with jax.numpy_dtype_promotion("standard"):
        for size in (1e-30, 1e6):
            mixed = [(size * one).astype(dtype) for one in scales()]

            def total(mixed, kind=kind, dtype=dtype):
                y = trained(kind)(mixed, SEEN, X.astype(dtype), Packed(FRAME))
                assert y.dtype == dtype
                return jnp.sum(y.astype(jnp.float32))

            value, gradient = jax.value_and_grad(total)(mixed)
            assert np.isfinite(value)
            for leaf in gradient:
                assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_position_changes_no_weight(kind):
    later = [one.at[:, 5:].add(3.0) for one in scales()]
    before = weights_of(kind, scales())
    after = weights_of(kind, later, x=X.at[:, 5:].add(3.0))
    assert (before[:, :, :5] == after[:, :, :5]).all()


def test_errors_of_channels_stay_mixed_where_sums_over_all_make_weights_one_hot():
    """A square root of a sum over positions and channels, of which the original has no mean."""
    for width in (64, 256):
        mixed = scales((1, 32, 4, width // 4))
        ours = np.asarray(Nash(1.0, 3).weights(mixed, jnp.ones((3, 1, 32), bool), X, Packed(FRAME)))
        assert 0.1 < ours.min() and ours.max() < 0.5
        whole = np.stack([np.asarray(one, np.float64)[0] for one in mixed])
        weights = np.full(3, 1 / 3)
        for _ in range(3):
            consensus = np.tensordot(weights, whole, 1)
            errors = np.sqrt(((whole - consensus) ** 2).sum(axis=(1, 2, 3)))
            weights = np.exp(errors.min() - errors) / np.exp(errors.min() - errors).sum()
        assert weights.max() > 0.99


def test_a_lower_temperature_gives_the_nearest_scales_more():
    close = [by_definition(scales(), t, 3)[1].mean() for t in (10.0, 1.0, 0.1)]
    found = [
        np.asarray(Nash(t, 3).weights(scales(), SEEN, X, Packed(FRAME)))[1].mean()
        for t in (10.0, 1.0, 0.1)
    ]
    np.testing.assert_allclose(found, close, atol=1e-5)
    assert found[0] > found[1] > found[2]


def test_the_penalty_of_learned_weights_has_a_gradient_and_the_original_one_had_none():
    def penalty(logits):
        context = Packed(FRAME)
        convex = Convex(3, 0.1)
        object.__setattr__(convex, "logits", logits)
        convex.weights(scales(), SEEN, X, context)
        total, weight = context.reported["sparsity"]
        return total / weight

    logits = jnp.array([0.5, -0.2, 0.1])
    slope = np.asarray(jax.grad(penalty)(logits))
    assert np.abs(slope).max() > 0.05
    assert penalty(logits - 0.5 * slope) < penalty(logits) < np.log(3)  # to sparser ones
    original = jax.grad(lambda x: jnp.sum(jnp.abs(jax.nn.softmax(x))))(logits)
    np.testing.assert_allclose(original, 0, atol=1e-7)


def test_the_sum_weighs_each_scale_and_reports_error_and_entropy_of_its_weights():
    frame = FRAME | {"document": FRAME["document"].at[:, 5:].set(-1)}
    context = Packed(frame)
    found = Uniform()(scales(), SEEN, X, context)
    np.testing.assert_allclose(found, np.mean(np.stack(scales()), axis=0), atol=1e-6)
    total, weight = context.reported["aggregation_entropy"]
    assert weight == 2 * 5 and total / weight == pytest.approx(np.log(3), abs=1e-5)
    total, weight = context.reported["aggregation_simplex_error"]
    assert weight == 2 * 5 and total / weight < 1e-6
    assert {name for name in context.reported if "{layer}" in name} == {
        "aggregation_entropy_{layer}",
        "aggregation_simplex_error_{layer}",
    }


def test_a_gate_starts_with_equal_weights():
    gate = Adaptive(SIZES, 3, key=jax.random.key(0))
    np.testing.assert_allclose(gate.weights(scales(), SEEN, X, Packed(FRAME)), 1 / 3, atol=1e-6)


def test_distances_are_of_every_two_scales():
    found = np.asarray(squared_distances(scales()))
    assert found.shape == (3, 3, 2, 7)
    expected = ((np.asarray(scales()[0]) - np.asarray(scales()[1])) ** 2).mean(axis=(2, 3))
    np.testing.assert_allclose(found[0, 1], expected, rtol=1e-5)
    assert (found == found.swapaxes(0, 1)).all() and (found[[0, 1, 2], [0, 1, 2]] == 0).all()


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ({"kind": "nash", "sparsity": 0.1}, "sparsity  is 0.1; nash does not read it"),
        ({"kind": "convex", "iterations": 3}, "iterations  is 3; convex does not read it"),
        ({"kind": "nash", "temperature": 0}, "temperature  is 0.0; it must be above 0"),
        ({"kind": "nash", "iterations": 0}, "iterations  is 0; it must be 1 or more"),
        ({"kind": "convex", "sparsity": -1}, "sparsity  is -1.0; it must be 0 or more"),
        ({"kind": "nasch"}, 'kind  is "nasch"; did you mean nash?'),
    ],
)
def test_an_aggregation_that_cannot_be_is_refused_by_key(entries, what):
    with pytest.raises(UserError) as error:
        read(Aggregation, entries)
    assert str(error.value) == f"1 problem in the recipe:\n  {what}"


def test_a_word_is_an_aggregation():
    config = tiny.config("multiscale")
    found = read(type(config), tree(config) | {"aggregation": "convex"})
    assert found.aggregation == Aggregation(kind="convex")
