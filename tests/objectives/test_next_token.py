"""Cross-entropy of the next token, against a plain computation and in sums that add up."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from windlass.layers import head
from windlass.layers.embedding import LookedUp
from windlass.networks import decoder
from windlass.objectives import Carry, Tally
from windlass.objectives.next_token import Objective


@eqx.filter_jit
def tally(objective, model, batch) -> Tally:
    return objective(model, batch, key=None, carry=Carry(), helpers={}, step=jnp.int32(0), steps=1)[
        0
    ]


def test_the_loss_with_its_penalties_is_that_of_a_plain_computation():
    model, batch = tiny.model("gru"), tiny.rows(96)
    found = tally(Objective(z_loss=0.01, label_smoothing=0.2), model, batch)

    logits = model.head.logits(model(batch)[0])
    log_p, z = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, axis=-1)
    targets = 0.8 * jax.nn.one_hot(batch["targets"], 96) + 0.2 / 96
    loss = -jnp.sum(log_p * targets, axis=-1) + 0.01 * z**2
    entropy = -jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]
    right = (jnp.argmax(logits, axis=-1) == batch["targets"]).astype(jnp.float32)
    weight = jnp.sum(batch["weight"])
    expected = {
        "loss": jnp.sum(loss * batch["weight"]) / weight,
        "cross_entropy": jnp.sum(entropy * batch["weight"]) / weight,
        "accuracy": jnp.sum(right * batch["weight"]) / weight,
    }
    assert tiny.apart(found.metrics(), expected) < 1e-5


def test_logits_that_collapsed_are_right_by_chance():
    model, batch = tiny.model("gru"), tiny.rows(96)
    collapsed = eqx.tree_at(lambda model: model.head.weight, model, replace_fn=jnp.zeros_like)
    assert tally(Objective(), collapsed, batch).metrics()["accuracy"] == pytest.approx(1 / 96)


def test_tallies_of_parts_add_up_to_that_of_the_whole():
    model, batch = tiny.model("gru"), tiny.rows(96)
    parts = [{name: x[i : i + 4] for name, x in batch.items()} for i in (0, 4)]
    first, second = (tally(Objective(), model, part) for part in parts)
    assert first.weight != second.weight
    whole = tally(Objective(), model, batch)
    assert tiny.apart(first + second, whole) < 1e-5


def test_a_shared_table_as_one_gpu_computes_its_gradient_has_that_of_its_parts(monkeypatch):
    with tiny.on((1, 1, 1)) as mesh:
        model, batch = tiny.placed(tiny.model("llama"), tiny.rows(96), mesh)
        assert model.output is None

        def gradient():
            def loss(model):
                return tiny.loss(model, batch)

            return eqx.filter_jit(eqx.filter_grad(loss))(model)

        expected = gradient()
        for module in (decoder, head):
            monkeypatch.setattr(module, "on_one_gpu", lambda: True)
        looked_up = model.looked_up(batch["tokens"]).embedding
        assert isinstance(looked_up, LookedUp)
        assert tiny.apart(gradient(), expected) < 1e-5


def test_extremes_are_maxima_and_sums_have_weights_of_their_own():
    one, two, nothing = jnp.float32(1), jnp.float32(2), jnp.float32(0)
    left = Tally(two, one, {"halted": (one, one)}, {"largest": two}, {})
    right = Tally(two, one, {"halted": (two, nothing)}, {"largest": one}, {})
    assert (left + right).metrics() == {"loss": 2, "halted": 3, "largest": 2}
    assert Tally(nothing, nothing, {}, {}, {}).metrics() == {"loss": 0}


def test_evaluation_is_the_objective_without_a_key():
    model, batch = tiny.model("gru"), tiny.rows(96)
    evaluated = eqx.filter_jit(Objective().evaluate)(
        model, batch, carry=Carry(), helpers={}, step=jnp.int32(0), steps=1
    )
    assert evaluated.total == tally(Objective(), model, batch).total


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Objective)])
def test_every_field_changes_the_loss(field):
    model, batch = tiny.model("gru"), tiny.rows(96)
    changed = dataclasses.replace(Objective(), **{field: 0.1})
    assert tally(changed, model, batch).total != tally(Objective(), model, batch).total


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("z_loss", -1.0, "z_loss is -1.0; it is a factor, 0 or more"),
        (
            "label_smoothing",
            1.0,
            "label_smoothing is 1.0; it is a share, 0 or more and below 1",
        ),
    ],
)
def test_a_penalty_that_cannot_be_is_refused(field, value, message):
    with pytest.raises(ValueError) as error:
        Objective(**{field: value})
    assert str(error.value) == message
