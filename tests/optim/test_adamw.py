"""AdamW: what is decayed, what is clipped, and that every field is read."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from tests import tiny
from windlass.optim import Schedule
from windlass.optim.adamw import Optimizer

CONSTANT = Schedule(shape="constant")


def updated(optimizer: Optimizer, gradient, weights):
    transformation = optimizer.build(100)
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(transformation.update)(gradient, transformation.init(weights), weights)


def test_decay_reaches_matrices_and_nothing_else():
    weights = tiny.model("llama")
    optimizer = Optimizer(learning_rate=0.1, weight_decay=0.5, schedule=CONSTANT)
    updates, _ = updated(optimizer, jax.tree.map(jnp.zeros_like, weights), weights)
    moved = {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.any(update != 0)
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
    }
    assert len(moved) == 18
    for path, has_moved in moved.items():
        assert has_moved == path.endswith(".weight"), path
    decayed = jax.tree.leaves(updates)[0]
    assert jnp.allclose(decayed, -0.05 * weights.embedding.weight)


def test_the_clip_applies_to_the_norm_of_the_whole_gradient():
    weights = {"one": jnp.ones(40), "two": jnp.ones((5, 6))}
    gradient = jax.tree.map(lambda x: 3 * x, weights)
    for clip, norm in ((0.25, 0.25), (1e6, optax.tree.norm(gradient))):
        optimizer = Optimizer(learning_rate=0.1, beta1=0.9, clip_norm=clip, schedule=CONSTANT)
        _, state = updated(optimizer, gradient, weights)
        seen = optax.tree.get(state, "mu")  # a tenth of the gradient
        assert abs(10 * optax.tree.norm(seen) / norm - 1) < 1e-5


def test_the_rate_follows_the_schedule():
    rate = Optimizer(learning_rate=0.5, schedule=Schedule(warmup_steps=10)).rate(110)
    found = [float(rate(step)) for step in (0, 5, 10, 60, 110)]
    assert found == pytest.approx([0, 0.25, 0.5, 0.25, 0])


OTHERS = dict(
    learning_rate=0.2,
    beta1=0.8,
    beta2=0.99,
    eps=1e-6,
    weight_decay=0.2,
    clip_norm=None,
    schedule=Schedule(warmup_steps=7),
)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Optimizer)])
def test_every_field_changes_the_update(field):
    optimizer, weights = Optimizer(learning_rate=0.1), tiny.model("gru")

    def program(optimizer):
        return str(jax.make_jaxpr(lambda w: updated(optimizer, w, w))(weights))

    changed = dataclasses.replace(optimizer, **{field: OTHERS[field]})
    assert program(changed) != program(optimizer)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", 0.0, "learning_rate is 0.0; it must be above 0"),
        ("beta1", 1.0, "beta1 is 1.0; it is a share, below 1"),
        ("beta2", -0.1, "beta2 is -0.1; it is a share, below 1"),
        ("clip_norm", 0.0, "clip_norm is 0.0; above 0, or null for no clipping"),
    ],
)
def test_a_number_that_cannot_be_is_refused(field, value, message):
    with pytest.raises(ValueError) as error:
        Optimizer(**{"learning_rate": 0.1, field: value})
    assert str(error.value) == message
