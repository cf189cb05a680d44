"""Expert layers: dropless routing, whatever the mesh, and their balance loss."""

import importlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.analysis.flops import training_flops
from windlass.layers.auxiliary import inside
from windlass.layers.context import Packed
from windlass.networks.experts.layer import ExpertLayer, GatedExperts, SharedExpert, mixed
from windlass.networks.experts.routing import Routing, route

SIZES = dict(embed=16, mlp=12, experts=8)


def layer(**settings) -> ExpertLayer:
    how: dict[str, Any] = dict(active=3, normalized=True, balance=0.1) | settings
    one, two = jax.random.split(jax.random.key(0))
    return ExpertLayer(SIZES, GatedExperts(SIZES, key=one), **how, key=two)


def states(rows: int = 8, length: int = 5) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, length, SIZES["embed"]))


def looped(experts: Any, x, routing: Routing) -> jax.Array:
    """One expert after the other, each of all tokens."""
    total = jnp.zeros_like(x)
    for e in range(SIZES["experts"]):
        gate, up, down = (one.weight[e] for one in (experts.gate, experts.up, experts.down))
        weight = jnp.sum(jnp.where(routing.experts == e, routing.weights, 0), axis=-1)
        total += weight[..., None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down)
    return total


def gradients(of, layer: ExpertLayer, x) -> tuple:
    @eqx.filter_jit
    def run(layer, x):
        def loss(given):
            layer, x = given
            routing = route(layer.router, x, layer.active, normalized=layer.normalized)
            return jnp.sum(jnp.sin(of(layer.experts, x, routing)))

        return eqx.filter_value_and_grad(loss)((layer, x))

    return run(layer, x)


@pytest.mark.parametrize("normalized", [True, False])
def test_outputs_and_gradients_are_those_of_a_loop_over_experts(normalized):
    own = layer(normalized=normalized)
    found, expected = (gradients(of, own, states()) for of in (mixed, looped))
    assert tiny.apart(found, expected) < 1e-5


MESHES = [((1, 1, 1), 2), ((2, 1, 1), 4), ((1, 2, 2), 2), ((2, 2, 2), 1)]


@pytest.mark.parametrize(("sizes", "expert"), MESHES)
def test_a_mesh_computes_what_one_device_does(sizes, expert):
    expected = gradients(mixed, layer(), states())
    with tiny.on(sizes, expert) as mesh:
        found = gradients(mixed, *tiny.placed(layer(), states(), mesh))
    assert tiny.apart(found, expected) < 1e-5


@pytest.mark.parametrize("expert", [1, 4])
def test_rows_that_do_not_divide_are_computed_all_the_same(expert):
    x = states(rows=1)
    expected = gradients(mixed, layer(), x)
    with tiny.on((1, 1, 2), expert) as mesh:
        model, _ = tiny.placed(layer(), {}, mesh)
        found = gradients(mixed, model, x)
    assert tiny.apart(found, expected) < 1e-5


@pytest.mark.parametrize("expert", [1, 4])
def test_no_token_is_lost_where_all_go_to_one_expert(expert):
    x = states()
    routing = Routing(
        probabilities=jnp.zeros((8, 5, 8)),
        weights=jnp.ones((8, 5, 1)),
        experts=jnp.full((8, 5, 1), 6),
    )
    expected = looped(layer().experts, x, routing)
    with tiny.on((1, 1, 2), expert) as mesh:
        model, (x, routing) = tiny.placed(layer(), (x, routing), mesh)
        found = jax.jit(lambda x, routing: mixed(model.experts, x, routing))(x, routing)
    assert jnp.all(jnp.any(found != 0, axis=-1))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_shared_expert_has_every_token_scaled_by_its_gate():
    shared = SharedExpert(SIZES, key=jax.random.key(2))
    x, plain = states(), layer()
    both = eqx.tree_at(lambda one: one.shared, plain, shared, is_leaf=lambda x: x is None)
    gate = jax.nn.sigmoid(x @ shared.gate.weight)
    np.testing.assert_allclose(both(x), plain(x) + gate * shared.mlp(x), atol=1e-5)


def reported(layer: ExpertLayer, x, document) -> dict[str, float]:
    context = Packed({"position": document, "document": document})
    with inside(context):
        layer(x)
    return {name: float(total / weight) for name, (total, weight) in context.reported.items()}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_5_moe"])
def test_the_balance_loss_is_that_of_transformers(name):
    torch = pytest.importorskip("torch")
    theirs = importlib.import_module(f"transformers.models.{name}.modeling_{name}")

    own, x = layer(), states()
    document = jnp.zeros((8, 5), jnp.int32).at[:3, 3:].set(-1)
    logits = torch.from_numpy(np.array(x @ own.router.weight).reshape(-1, 8))
    mask = torch.from_numpy(np.array(document >= 0))
    expected = theirs.load_balancing_loss_func((logits,), 8, 3, mask)
    assert abs(reported(own, x, document)["balance"] - float(expected)) < 1e-5


def test_metrics_say_how_experts_are_used():
    own = layer(active=2)
    weight = jnp.zeros((16, 8)).at[:, 3].set(5.0).at[:, 6].set(3.0)
    own = eqx.tree_at(lambda one: one.router.weight, own, weight)
    found = reported(own, jnp.ones((2, 4, 16)), jnp.zeros((2, 4), jnp.int32))
    assert found["dead_experts"] == found["dead_experts_{layer}"] == 6
    assert found["expert_load_3"] == found["expert_load_6"] == found["expert_load_highest"] == 4
    assert found["expert_load_0"] == 0
    assert found["router_entropy"] < 1e-6
    even = eqx.tree_at(lambda one: one.router.weight, own, jnp.zeros((16, 8)))
    found = reported(even, jnp.ones((2, 4, 16)), jnp.zeros((2, 4), jnp.int32))
    assert abs(found["router_entropy"] - np.log(8)) < 1e-6


@pytest.mark.parametrize(("sizes", "expert"), [((1, 1, 1), 1), ((1, 1, 2), 4)])
def test_flops_are_those_of_the_experts_that_a_token_has(sizes, expert):
    own, x = layer(), states()
    with tiny.on(sizes, expert) as mesh:
        model, x = tiny.placed(own, x, mesh)
        found = training_flops(lambda model, x: jnp.sum(model(x)), model, x)
    of_token = 3 * SIZES["embed"] * SIZES["mlp"] * own.active + SIZES["embed"] * SIZES["experts"]
    # Twice forward, and twice for the gradients by weights; by inputs, which nothing trains, only
    # inside of experts and of the router's weights.
    inside = SIZES["embed"] * SIZES["mlp"] * own.active
    assert found == 2 * 8 * 5 * (2 * of_token + inside)
