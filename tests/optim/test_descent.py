"""What all optimisers have in common: one clip, decay, groups and the schedule."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from windlass.config import read
from windlass.errors import UserError
from windlass.layers.names import named
from windlass.optim import Descent, Group, Schedule, adamw, muon, sign
from windlass.optim.adamw import Optimizer

CONSTANT = Schedule(shape="constant")
EMBEDDING = Group(match="embedding.*", learning_rate=0.01, weight_decay=0.0)


def updated(optimizer: Descent, gradient, weights, step: int = 0):
    built = optimizer.build(100, weights)
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(built.update)(gradient, built.init(weights), weights, step=step)


def decayed(optimizer: Descent) -> dict[str, np.ndarray]:
    """Each weight's update where there is no gradient, as a share of the weight."""
    weights = tiny.model("llama")
    updates, _ = updated(optimizer, jax.tree.map(jnp.zeros_like, weights), weights)
    pairs = zip(named(updates), jax.tree.leaves(weights), strict=True)
    return {name: np.asarray(update / weight) for (name, update), weight in pairs}


def test_decay_reaches_matrices_and_nothing_else():
    found = decayed(Optimizer(learning_rate=0.1, weight_decay=0.5, schedule=CONSTANT))
    assert len(found) == 18
    for name, share in found.items():
        expected = -0.05 if name.endswith(".weight") else 0.0
        np.testing.assert_allclose(share, expected, rtol=1e-6, err_msg=name)


def test_the_clip_applies_to_the_norm_of_the_whole_gradient_whatever_the_groups():
    weights = {"one": jnp.ones(40), "two": jnp.ones((5, 6))}
    gradient = jax.tree.map(lambda x: 3 * x, weights)
    for clip, norm in ((0.25, 0.25), (1e6, optax.tree.norm(gradient))):
        optimizer = Optimizer(
            learning_rate=0.1,
            beta1=0.9,
            clip_norm=clip,
            groups=(Group(match="two", learning_rate=0.3),),
        )
        _, state = updated(optimizer, gradient, weights)
        seen = optax.tree.get(state, "mu")  # a tenth of the gradient
        assert abs(10 * optax.tree.norm(seen) / norm - 1) < 1e-5


def test_the_rate_follows_the_schedule():
    rate = Optimizer(learning_rate=0.5, schedule=Schedule(warmup_steps=10)).rate(110)
    found = [float(rate(step)) for step in (0, 5, 10, 60, 110)]
    assert found == pytest.approx([0, 0.25, 0.5, 0.25, 0])


def test_an_update_is_taken_at_the_rate_of_the_step_of_the_run():
    optimizer = Optimizer(learning_rate=0.5, schedule=Schedule(warmup_steps=10))
    weights = {"weight": jnp.ones(3)}
    for step in (0, 5, 55):
        # Adam's first update is the sign of the gradient, however many steps were left out.
        updates, _ = updated(optimizer, weights, weights, step)
        np.testing.assert_allclose(updates["weight"], -optimizer.rate(100)(step), rtol=1e-6)


# Groups


def test_a_group_has_its_own_rate_and_decay_and_the_first_that_matches_wins():
    optimizer = Optimizer(
        learning_rate=0.1,
        weight_decay=0.5,
        schedule=CONSTANT,
        groups=(
            EMBEDDING,
            Group(match="blocks.mlp.up.*", weight_decay=0.2),
            Group(match="blocks.mlp.*", learning_rate=0.3),
        ),
    )
    found = {name: float(share.ravel()[0]) for name, share in decayed(optimizer).items()}
    assert found["embedding.weight"] == 0
    assert found["blocks.mlp.up.weight"] == pytest.approx(-0.1 * 0.2)
    assert found["blocks.mlp.gate.weight"] == pytest.approx(-0.3 * 0.5)
    assert found["blocks.mlp.gate.bias"] == found["blocks.mlp_norm.scale"] == 0
    assert found["blocks.attention.query.weight"] == pytest.approx(-0.1 * 0.5)


def test_groups_share_the_schedule_and_one_state():
    plain = Optimizer(learning_rate=0.1, weight_decay=0.0)
    grouped = Optimizer(learning_rate=0.1, weight_decay=0.0, groups=(EMBEDDING,))
    weights = tiny.model("llama")
    for step in (0, 70):
        expected, state = updated(plain, weights, weights, step)
        found, own = updated(grouped, weights, weights, step)
        assert eqx.tree_equal(own, state)
        for (name, a), (_, b) in zip(named(found), named(expected), strict=True):
            share = 0.1 if name == "embedding.weight" else 1.0
            np.testing.assert_allclose(a, share * b, rtol=1e-6, atol=0, err_msg=name)


def test_groups_are_told_with_their_sizes_and_a_run_without_them_tells_nothing():
    weights = eqx.filter(tiny.model("llama"), eqx.is_array)
    config = tiny.config("llama")
    total = sum(x.size for x in jax.tree.leaves(weights))
    embedding = config.vocab * config.embed
    optimizer = Optimizer(learning_rate=3e-3, groups=(EMBEDDING,))
    assert optimizer.lines(weights) == [
        f"embedding.*: {embedding:,} parameters, learning_rate 0.01, weight_decay 0",
        f"the rest: {total - embedding:,} parameters, learning_rate 0.003, weight_decay 0.1",
    ]
    assert Optimizer(learning_rate=3e-3).lines(weights) == []


def test_a_group_of_another_kind_has_the_updates_and_the_state_of_that_kind_alone():
    weights = eqx.filter(tiny.model("llama"), eqx.is_array)
    gradient = jax.tree.map(lambda x: jnp.cos(7 * x), weights)
    plain = Optimizer(learning_rate=0.1, weight_decay=0.3, clip_norm=0.5)
    groups = (
        Group(match="embedding.*", kind=sign.Rule(), learning_rate=0.02, clipped=True),
        Group(match="blocks.mlp.*", kind=muon.Rule(momentum=0.9), weight_decay=0.0),
    )
    mixed = dataclasses.replace(plain, groups=groups)
    alone = {
        "the rest": plain,
        "embedding": sign.Optimizer(learning_rate=0.02, weight_decay=0.3, clip_norm=0.5),
        "blocks.mlp": muon.Optimizer(
            learning_rate=0.1, weight_decay=0.0, clip_norm=0.5, momentum=0.9
        ),
    }
    found, state = updated(mixed, gradient, weights, step=20)
    expected = {
        name: dict(named(updated(one, gradient, weights, step=20)[0]))
        for name, one in alone.items()
    }
    for name, update in named(found):
        owner = next((one for one in alone if name.startswith(f"{one}.")), "the rest")
        np.testing.assert_array_equal(update, expected[owner][name], err_msg=name)
    # Adam's two moments of the rest, one momentum of matrices, two of the biases beside them.
    config = tiny.config("llama")
    sizes = {name: x.size for name, x in named(weights)}
    mlp = {name: size for name, size in sizes.items() if name.startswith("blocks.mlp.")}
    maps = sum(size for name, size in mlp.items() if name.endswith(".weight"))
    rest = sum(sizes.values()) - sum(mlp.values()) - config.vocab * config.embed
    held = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert held == 2 * rest + maps + 2 * (sum(mlp.values()) - maps)


def test_a_group_may_be_outside_of_the_clip_as_sign_descent_is():
    weights = {"table": jnp.ones((4, 2)), "head": jnp.ones((3, 2))}
    gradient = {"table": jnp.full((4, 2), 1e3), "head": jnp.ones((3, 2))}

    def moment(clip: float, *groups: Group) -> dict:
        optimizer = Optimizer(learning_rate=0.1, beta1=0.9, clip_norm=clip, groups=groups)
        return optax.tree.get(updated(optimizer, gradient, weights)[1][1].rest, "mu")

    outside = Group(match="table", kind=sign.Rule())
    np.testing.assert_allclose(moment(100.0, outside)["head"], 0.1, rtol=1e-6)
    np.testing.assert_allclose(moment(6**0.5 / 2, outside)["head"], 0.05, rtol=1e-6)
    inside = dataclasses.replace(outside, clipped=True)
    assert moment(100.0, inside)["head"].max() < 0.01
    plain = Group(match="table", clipped=False)
    _, state = updated(Optimizer(learning_rate=0.1, groups=(plain,)), gradient, weights)
    seen = optax.tree.get(state, "mu")
    np.testing.assert_allclose(seen["table"], 100.0, rtol=1e-6)
    np.testing.assert_allclose(optax.tree.norm(seen["head"]), 0.1, rtol=1e-6)


@pytest.mark.long
def test_a_recipe_puts_muon_on_blocks_and_adamw_with_its_own_settings_on_the_rest():
    words = {
        **dict(kind="muon", learning_rate=0.02, weight_decay=0.005, clip_norm=None),
        "groups": [
            {
                "match": "embedding.*",
                "kind": {"kind": "adamw", "beta1": 0.8, "beta2": 0.9},
                **dict(learning_rate=1e-4, weight_decay=1.0),
            },
            {
                "match": "norm.*",
                "kind": "adamw",
                "learning_rate": 1e-4,
                "schedule": {"warmup_steps": 50, "shape": "constant"},
            },
        ],
    }
    optimizer = read(muon.Optimizer, {k: x for k, x in words.items() if k != "kind"})
    weights = eqx.filter(tiny.model("llama"), eqx.is_array)
    gradient = jax.tree.map(lambda x: jnp.cos(7 * x), weights)
    adam = adamw.Optimizer(
        learning_rate=1e-4, weight_decay=1.0, beta1=0.8, beta2=0.9, clip_norm=None
    )
    alone = muon.Optimizer(learning_rate=0.02, weight_decay=0.005, clip_norm=None)
    late = adamw.Optimizer(
        learning_rate=0.5e-4, weight_decay=0.005, clip_norm=None, schedule=CONSTANT
    )
    by = {"embedding": adam, "norm": late, "": alone}
    expected = {p: dict(named(updated(o, gradient, weights, 25)[0])) for p, o in by.items()}
    for name, update in named(updated(optimizer, gradient, weights, 25)[0]):
        owner = next(one for one in by if name.startswith(one))
        np.testing.assert_allclose(update, expected[owner][name], rtol=1e-6, err_msg=name)


def test_the_schedule_unless_another_is_named_is_a_cosine_to_zero_without_warmup():
    rate = Optimizer(learning_rate=0.5).rate(8000)
    found = [float(rate(step)) for step in (0, 2000, 4000, 8000)]
    assert found == pytest.approx([0.5, 0.25 * (1 + 2**-0.5), 0.25, 0.0], abs=1e-7)


def test_groups_of_other_kinds_are_told_by_them():
    weights = {"embedding": jnp.ones(3), "head": jnp.ones(4)}
    optimizer = Optimizer(learning_rate=0.1, groups=(Group(match="embedding", kind=sign.Rule()),))
    assert optimizer.kinds == "adamw, sign for embedding"
    assert optimizer.lines(weights) == [
        "embedding by sign: 3 parameters, learning_rate 0.1, weight_decay 0.1",
        "the rest: 4 parameters, learning_rate 0.1, weight_decay 0.1",
    ]


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_that_are_near():
    weights = {"embedding": jnp.ones(3), "head": jnp.ones(3)}
    optimizer = Optimizer(learning_rate=0.1, groups=(Group(match="embeding*", weight_decay=0.0),))
    with pytest.raises(UserError) as refusal:
        optimizer.build(10, weights)
    assert str(refusal.value) == (
        "optim.groups: embeding* matches no weight that is trained; did you mean embedding? "
        "there are\n  embedding\n  head"
    )


def test_a_weight_that_is_frozen_is_in_no_group():
    optimizer = Optimizer(learning_rate=0.1, groups=(EMBEDDING,))
    frozen = eqx.tree_at(lambda model: model.embedding.weight, tiny.model("llama"), None)
    with pytest.raises(UserError) as refusal:
        optimizer.build(10, frozen)
    assert "embedding.* matches no weight that is trained" in str(refusal.value)


def test_a_group_that_others_leave_nothing_is_refused():
    groups = (Group(match="*", weight_decay=0.2), EMBEDDING)
    with pytest.raises(UserError) as refusal:
        Optimizer(learning_rate=0.1, groups=groups).build(10, tiny.model("llama"))
    assert str(refusal.value) == (
        "optim.groups: embedding.* matches only what groups before it match; put it before them, "
        "or leave it out"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(learning_rate=0.0), "learning_rate is 0.0; it must be above 0"),
        (dict(weight_decay=-0.1), "weight_decay is -0.1; it must be 0 or more"),
        (dict(beta1=1.0), "beta1 is 1.0; it is a share, below 1"),
        (dict(beta2=-0.1), "beta2 is -0.1; it is a share, below 1"),
        (dict(eps=0.0), "eps is 0.0; it must be above 0"),
        (dict(clip_norm=0.0), "clip_norm is 0.0; above 0, or null for no clipping"),
    ],
)
def test_a_number_that_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError) as error:
        Optimizer(**{"learning_rate": 0.1, **keys})
    assert str(error.value) == message


def test_every_problem_of_the_groups_of_a_recipe_comes_in_one_message():
    groups = [
        {"match": "head.*"},
        {"match": "norm.*", "learning_rate": 0, "weight_decay": -1},
        {"learning_rte": 1e-3},
        {"match": "*", "kind": "lionn"},
        {"match": "*", "kind": {"kind": "lion", "beta1": 2}},
        {"match": "*", "kind": {"kind": "lion", "momentum": 0.9}},
    ]
    with pytest.raises(UserError) as refusal:
        read(Optimizer, {"learning_rate": 0.1, "groups": groups})
    assert str(refusal.value) == (
        "8 problems in the recipe:\n"
        "  groups.0                says nothing of head.*: learning_rate, weight_decay or kind "
        "would\n"
        "  groups.1.learning_rate  is 0.0; it must be above 0\n"
        "  groups.1.weight_decay   is -1.0; it must be 0 or more\n"
        "  groups.2.learning_rte   unknown; did you mean learning_rate?\n"
        "  groups.2.match          is required: text\n"
        '  groups.3.kind.kind      is "lionn"; did you mean lion? there are adafactor, '
        "adam_atan2, adamw, lion, muon and sign\n"
        "  groups.4.kind.beta1     is 2.0; it is a share, below 1\n"
        "  groups.5.kind.momentum  unknown; did you mean moment?"
    )
