"""Hyper-connections as their papers write them, in torch; and streams that do not persist."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests import tiny
from tests.test_doubly_stochastic import by_definition
from windlass.layers.context import Packed
from windlass.layers.residual import Connection, Plain
from windlass.residuals import Architecture, channel_gate, hc, mhc, mhc_lite, sinkhorn_dense

N, WIDTH, ROWS, LENGTH = 4, 24, 2, 5
SIZES = {"embed": WIDTH}
BATCH = {name: jnp.zeros((ROWS, LENGTH), jnp.int32) for name in ("position", "document")}


def rough(tree, seed: int = 3):
    """Weights as after some steps: none of them is 0, and streams are unlike."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + rng.normal(size=x.shape).astype(np.float32) if eqx.is_array(x) else x, tree
    )


def connection(residual) -> Any:
    return rough(residual.connection("mlp", jnp.int32(1), SIZES, key=jax.random.key(0)))


def streams() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(N, ROWS, LENGTH, WIDTH)).astype(np.float32)


def ours(one: Connection, residual, x: np.ndarray):
    """The streams after a connection whose branch is tanh, and gradients of their squares."""

    def after(one, x):
        state = residual.widen(x[0])._replace(streams=tuple(x))
        return jnp.stack(one(state, jnp.tanh, Packed(BATCH)).streams)

    def loss(both):
        return jnp.sum(after(*both) ** 2)

    return jax.jit(after)(one, x), jax.jit(jax.grad(loss))((one, jnp.asarray(x)))


def manifold(w: dict, x: torch.Tensor):
    """pre, post and res of the paper on mHC, for streams [tokens, n, C]."""
    normed = x.flatten(1) / torch.sqrt(x.flatten(1).square().mean(-1, keepdim=True) + 1e-6)
    products = normed @ w["phi"].flatten(1).T
    pre, post, res = products.split([N, N, products.shape[1] - 2 * N], dim=1)
    pre = torch.sigmoid(w["alpha"][0] * pre + w["pre"])
    post = 2 * torch.sigmoid(w["alpha"][1] * post + w["post"])
    return pre, post, w["alpha"][2] * res + w["res"].flatten()


def mhc_coefficients(w: dict, x: torch.Tensor):
    pre, post, res = manifold(w, x)
    return pre, post, by_definition(res.reshape(-1, N, N), 20)


def hc_coefficients(w: dict, x: torch.Tensor):
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    moved = torch.tanh(normed @ w["phi"].T)  # [tokens, streams, coefficients]
    pre = w["alpha"][0] * moved[..., 0] + w["pre"]
    post = w["alpha"][1] * moved[..., 1] + w["post"]
    return pre, post, w["alpha"][2] * moved[..., 2:].transpose(1, 2) + w["res"]


PAPERS = {"mhc": (mhc.Residual(), mhc_coefficients), "hc": (hc.Residual(), hc_coefficients)}


@pytest.mark.parametrize("kind", PAPERS)
def test_a_connection_and_its_gradients_are_those_of_the_paper(kind):
    residual, coefficients = PAPERS[kind]
    one, x = connection(residual), streams()
    names = ("phi", "alpha", "pre", "post", "res")
    weights = {
        name: torch.tensor(np.asarray(getattr(one, name)), dtype=torch.float64, requires_grad=True)
        for name in names
    }
    theirs = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    tokens = theirs.permute(1, 2, 0, 3).reshape(-1, N, WIDTH)
    pre, post, res = coefficients(weights, tokens)
    read = torch.einsum("tn,tnc->tc", pre, tokens)
    after = res @ tokens + post[:, :, None] * torch.tanh(read)[:, None]
    after.square().sum().backward()
    expected = after.detach().reshape(ROWS, LENGTH, N, WIDTH).permute(2, 0, 1, 3)

    found, (gradient, of_x) = ours(one, residual, x)
    assert tiny.apart(found, expected.numpy()) < 1e-5
    assert theirs.grad is not None
    assert tiny.apart(of_x, theirs.grad.numpy()) < 1e-5
    for name, weight in weights.items():
        assert weight.grad is not None
        assert tiny.apart(getattr(gradient, name), weight.grad.numpy()) < 1e-5, name


def test_the_streams_of_mhc_lite_are_mixed_by_its_permutations():
    residual = mhc_lite.Residual(streams=2)
    one = connection(residual)
    x = streams()[:2]
    pre, post, res = one.coefficients(tuple(jnp.asarray(x)))
    np.testing.assert_allclose(res[0][0] + res[0][1], 1, atol=1e-6)
    np.testing.assert_allclose(res[0][0], res[1][1], atol=1e-6)
    assert 0 < float(jnp.min(pre[0])) < float(jnp.max(post[0])) < 2


class Joined(eqx.Module):
    """Streams that are joined behind every connection, and begin anew as copies."""

    inner: Connection
    residual: mhc.Residual = eqx.field(static=True)

    def __call__(self, x, branch, context):
        return self.residual.widen(self.residual.narrow(self.inner(x, branch, context)))


def test_streams_that_are_joined_each_time_are_silently_the_plain_residual():
    residual, x = mhc.Residual(), jnp.asarray(streams()[0])
    moved = []
    for layer in range(2):
        one = residual.connection("mlp", jnp.int32(layer), SIZES, key=jax.random.key(0))
        mixing = 3 * jax.random.normal(jax.random.key(layer), (N, N))
        # Two streams are written more and two less: in the mean by 1.
        wrote = jnp.array([2.0, -2.0, 1.0, -1.0])
        moved.append(eqx.tree_at(lambda one: (one.res, one.post), one, (mixing, wrote)))

    def through(connections, x):
        for one in connections:
            x = one(x, jnp.tanh, Packed(BATCH))
        return x

    plain = through([Plain(), Plain()], x)
    joined = residual.narrow(through([Joined(one, residual) for one in moved], residual.widen(x)))
    kept = residual.narrow(through(moved, residual.widen(x)))
    assert tiny.apart(joined, plain) < 1e-5
    assert tiny.apart(kept, plain) > 1e-2


def test_the_dense_matrix_of_logits_near_zero_leaves_only_the_mean_of_the_stream():
    logits = 0.01 * jax.random.normal(jax.random.key(0), (64, 64))
    mixing = np.asarray(sinkhorn_dense.dense_sinkhorn(logits, 10))
    np.testing.assert_allclose(mixing.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(mixing.sum(1), 1, atol=1e-5)
    assert np.linalg.svd(mixing, compute_uv=False)[1] < 0.01


def test_ablations_of_one_stream_are_their_equations():
    x = streams()[0]
    gate = connection(channel_gate.Residual())
    share = 1 / (1 + np.exp(-np.asarray(gate.logits)))
    expected = np.asarray(gate.scale) * (share * x + (1 - share) * np.tanh(x))
    np.testing.assert_allclose(gate(jnp.asarray(x), jnp.tanh, Packed(BATCH)), expected, atol=1e-5)

    dense = connection(sinkhorn_dense.Residual())
    mixing = np.asarray(sinkhorn_dense.dense_sinkhorn(dense.logits, 10))
    expected = x @ mixing.T + np.tanh(x) @ (np.eye(WIDTH) - mixing).T
    found = dense(jnp.asarray(x), jnp.tanh, Packed(BATCH))
    np.testing.assert_allclose(found, np.asarray(dense.scale) * expected, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mhc.Residual(streams=0), "streams is 0; it must be 1 or more"),
        (lambda: mhc.Residual(iterations=0), "iterations is 0; it must be 1 or more"),
        (lambda: sinkhorn_dense.Residual(iterations=0), "iterations is 0; it must be 1 or more"),
        (
            lambda: mhc_lite.Residual(streams=6),
            "streams is 6, of which there are 720 permutations; it must be 5 or less here, and mhc "
            "takes any number",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value) == message


@pytest.mark.long
def test_the_gain_over_24_layers_stays_low_in_training():
    config = dataclasses.replace(tiny.config("llama"), layers=24)
    model = Architecture(config, mhc.Residual()).init(jax.random.key(0))
    batch = tiny.rows(config.vocab)
    weights, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adam(3e-3)

    def loss(weights):
        tally = tiny.tally(eqx.combine(weights, static), batch)
        return tally.total / tally.weight, tally.auxiliary

    @jax.jit
    def step(weights, moments):
        (value, reported), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value, reported

    moments, values = optimizer.init(weights), []
    for _ in range(100):
        weights, moments, value, reported = step(weights, moments)
        values.append(float(value))
    found = {name: float(total / weight) for name, (total, weight) in reported.items()}
    print(values[0], values[-1], found["residual_gain_forward"], found["residual_gain_backward"])
    assert values[-1] < values[0]
    assert max(found["residual_gain_forward"], found["residual_gain_backward"]) <= 1.7
