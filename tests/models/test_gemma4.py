"""Gemma 4's layers of several stacks are one model, in a loop or not, however many share."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

from tests import tiny
from windlass.layers.stack import arrange

# Two rounds and a layer before the round that others share keys of, and two and one that share.
LOOPED = dataclasses.replace(tiny.config("gemma4"), layers=12, kv_shared_layers=5)


@pytest.mark.long
def test_layers_in_loops_compute_what_they_compute_one_by_one():
    model, batch = tiny.made(LOOPED), tiny.rows(96)
    loop, apart = (arrange(model, remat="saved", unroll=unroll) for unroll in (1, 12))
    assert loop.kv_shared_blocks.is_loop and not apart.kv_shared_blocks.is_loop
    run = eqx.filter_jit(eqx.filter_value_and_grad(tiny.loss))
    (one, first), (other, second) = run(loop, batch), run(apart, batch)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    gradients = [dict(enumerate(jax.tree.leaves(each))) for each in (first, second)]
    assert tiny.apart(*gradients) < 1e-3  # rounding, over twelve layers


@pytest.mark.parametrize(("shared", "stacks"), [(0, (8, 0, 0)), (3, (3, 2, 3)), (6, (0, 2, 6))])
def test_every_layer_is_in_one_of_the_stacks(shared, stacks):
    config = dataclasses.replace(tiny.config("gemma4"), layers=8, kv_shared_layers=shared)
    model = tiny.abstract(config)
    held = [model.blocks, model.kv_source_blocks, model.kv_shared_blocks]
    assert tuple(0 if one is None else one.layers for one in held) == stacks
    numbers = [
        number
        for one in held
        if one
        for kind in range(len(one.kinds))
        for number in one.numbers(kind)
    ]
    assert sorted(numbers) == list(range(8))


def test_the_scale_of_a_layer_is_never_trained():
    model, batch = tiny.model("gemma4"), tiny.rows(96)
    gradient = eqx.filter_jit(eqx.filter_grad(tiny.loss))(model, batch)
    scales = jax.tree.leaves(gradient.blocks.kinds[0].scalar)
    assert all(not np.any(one) for one in scales)
    assert np.any(gradient.blocks.kinds[0].per_layer.gate.weight)
