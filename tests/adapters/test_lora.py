"""LoRA on every family: at first the same model, then one that merges into a plain one."""

from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass import adapters
from windlass.adapters.lora import Adapter
from windlass.errors import UserError
from windlass.layers.dropout import Dropout, keyed
from windlass.layers.linear import Linear
from windlass.layers.stack import arrange

# On one family what adds, on the others what takes the lengths of its maps as well.
PLAIN = Adapter(rank=3, alpha=5.0)
DORA = Adapter(rank=3, alpha=5.0, scaling="rslora", dora=True)


key = jax.random.key


def moved(model):
    """An adapted model whose adapters are not at their start."""
    own, rest = eqx.partition(model, adapters.own(eqx.filter(model, eqx.is_array)))
    waves = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), own
    )
    return eqx.combine(waves, rest)


def test_an_adapter_starts_as_nothing_and_merges_into_a_plain_model(unlike):
    has_experts = hasattr(tiny.config(unlike), "experts")  # which refuse DoRA
    adapter = PLAIN if unlike == "gemma" or has_experts else DORA
    model, batch = tiny.model(unlike), tiny.rows(tiny.config(unlike).vocab)
    if unlike == "echo_state":  # all but its head is fixed, and no linear map
        with pytest.raises(UserError, match="matches no linear map"):
            adapter.adapt(model, names={}, key=key(1))
        return

    @eqx.filter_jit
    def losses(model):
        start = adapter.adapt(model, names={}, key=key(1))
        trained = moved(start)
        models = (model, start, trained, adapters.merged(trained))
        return [tiny.loss(each, batch) for each in models], adapters.plain(trained)

    found, plain = losses(model)
    base, start, trained, merged = map(float, found)
    assert start == pytest.approx(base, rel=1e-6)
    assert abs(trained - base) > 1e-3
    assert merged == pytest.approx(trained, rel=1e-5)
    assert eqx.tree_equal(plain, model)


@eqx.filter_jit
def step(own, rest, batch, key):
    """A loss and the adapter's gradient, with dropout where there is a key."""

    def loss(own):
        model = eqx.combine(own, rest)
        return tiny.loss(model if key is None else keyed(model, key), batch)

    return jax.value_and_grad(loss)(own)


@pytest.mark.long
def test_loss_and_gradients_with_dropout_are_the_same_on_a_mesh_of_all_three_axes():
    adapter = Adapter(rank=3, dropout=0.3, dora=True)
    model = moved(eqx.filter_jit(adapter.adapt)(tiny.model("llama"), names={}, key=key(1)))
    model = eqx.filter_jit(arrange)(model, remat="full", unroll=1)
    batch = tiny.rows(tiny.config("llama").vocab)
    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with tiny.on(sizes) as mesh:
            whole, rows = tiny.placed(model, batch, mesh)
            own, rest = eqx.partition(whole, adapters.own(whole))
            found.append(jax.device_get(step(own, rest, rows, key(2))))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert tiny.apart(found[1][1], found[0][1]) < 1e-5


@pytest.mark.long
def test_a_dropout_is_its_own_in_every_map_layer_and_step_and_the_same_for_the_same_key():
    adapter = Adapter(rank=2, dropout=0.5)
    model = eqx.filter_jit(adapter.adapt)(tiny.model("gemma"), names={}, key=key(1))

    def drawn(key) -> list:
        found = jax.tree.leaves(keyed(model, key), is_leaf=lambda x: isinstance(x, Dropout))
        return [x.key for x in found if isinstance(x, Dropout)]

    first, again, other = drawn(key(0)), drawn(key(0)), drawn(key(1))
    assert eqx.tree_equal(first, again)
    every = np.concatenate([*first, *other])
    assert every.shape == (2 * 4 * 7, 2)  # two steps, four layers in two kinds, seven maps
    assert len(np.unique(every, axis=0)) == len(every)


def test_dropout_leaves_the_share_it_says_and_makes_up_for_the_rest():
    dropped = Dropout(0.25, (), jax.random.key_data(key(3)))(jnp.ones((100, 100)), ("", ""))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.02)


def test_dora_computes_the_base_again_on_what_was_dropped_as_peft_does():
    linear = tiny.model("llama").blocks.kinds[0].attention.query
    linear = jax.tree.map(lambda x: x[0], linear)
    made = moved(
        Adapter(rank=2, alpha=3.0, dora=True, dropout=0.5).adapt(linear, names={}, key=key(1))
    )
    made = keyed(made, key(5))
    x = jax.random.normal(key(6), (3, 4, 32))
    kept = np.asarray(made.dropout(x, ("", "", "")))
    w, a, b = (
        np.asarray(m.weight).reshape(m.weight.shape[0], -1) for m in (linear, made.down, made.up)
    )
    ratio = np.asarray(made.magnitude).ravel() / np.linalg.norm(w + 1.5 * a @ b, axis=0)
    bias = np.asarray(linear.bias).ravel()
    expected = x @ w + bias + (ratio - 1) * (kept @ w) + ratio * 1.5 * (kept @ a @ b)
    assert np.abs(np.asarray(made(x)).reshape(3, 4, -1) - expected).max() < 1e-5


@pytest.mark.parametrize(("rate", "random"), [(0.0, False), (0.1, True)])
def test_no_random_number_is_drawn_without_dropout_or_without_a_key(rate, random):
    adapter, plain = Adapter(rank=2, dropout=rate), tiny.model("llama")
    model = eqx.filter_eval_shape(lambda: adapter.adapt(plain, names={}, key=key(1)))
    batch = tiny.rows(96)

    def program(key) -> str:
        loss = lambda model: tiny.loss(model if key is None else keyed(model, key), batch)  # noqa: E731
        return str(eqx.filter_make_jaxpr(loss)(model)[0])

    assert "random" not in program(None) and "threefry" not in program(None)
    assert ("random" in program(key(0))) == random


def test_adapters_start_as_peft_and_as_a_normal_distribution_say():
    linear = Linear("heads head_dim", "embed", dict(heads=8, head_dim=32, embed=4), key=key(0))
    peft, normal = Adapter(rank=64), Adapter(rank=64, init="normal")
    for adapter, spread in ((peft, 1 / 16 / np.sqrt(3)), (normal, 0.02)):
        made: Any = adapter.adapt(linear, names={}, key=key(1))
        assert np.std(made.down.weight) == pytest.approx(spread, rel=0.03)
        assert not made.up.weight.any()
    bound = np.abs(cast(Any, peft.adapt(linear, names={}, key=key(1))).down.weight).max()
    assert 0.99 / 16 < bound <= 1 / 16
