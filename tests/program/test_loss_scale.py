"""float16: what its loss scale saves, and what an overflow does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.training.bench import Bench, batch
from windlass.devices.axes import cast
from windlass.objectives import Carry
from windlass.objectives.next_token import Objective
from windlass.program.loss_scale import GROWS_AFTER, START, LossScale
from windlass.program.step import State, accumulate


def gradient(compute: str, scale: float | None):
    """Of a model whose last maps are so small that what comes back from them is beyond float16."""
    model = tiny.model("gru")

    def last(model):
        return model.head.weight, model.blocks.kinds[0].writes.weight

    model = eqx.tree_at(last, model, [2e-4 * weight for weight in last(model)])
    arrays, static = eqx.partition(model, eqx.is_array)

    def total(weights, rows, key, carry):
        whole = cast(eqx.combine(weights, static), compute)
        tally, carry = Objective()(
            whole, rows, key=key, carry=carry, helpers={}, step=jnp.int32(0), steps=1
        )
        return tally.total, (tally, carry)

    @jax.jit
    def run(weights, scale):
        rows = batch(0, tiny.config("gru").vocab)
        return accumulate(total, weights, rows, Carry(), jax.random.key(0), 2, scale)

    return run(arrays, None if scale is None else jnp.float32(scale))[2]


def kept(found, expected) -> float:
    """How much of the gradient of the first map of a layer is there."""
    inside, whole = (tree.blocks.kinds[0].reads.weight.ravel() for tree in (found, expected))
    return float(jnp.vdot(inside, whole) / jnp.vdot(whole, whole))


@pytest.mark.long
def test_small_gradients_survive_in_float16_with_the_scale_and_vanish_without():
    exact = gradient("float32", None)
    scaled = gradient("float16", START)
    assert kept(scaled, exact) == pytest.approx(1, abs=1e-2)
    assert kept(gradient("float16", 1.0), exact) < 0.1
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(scaled))
    # The same numbers whatever the scale: it is undone before anybody looks.
    assert kept(gradient("float32", START), exact) == pytest.approx(1, abs=1e-5)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("gru", (2, 2, 2), 2, compute="float16")


def copied(state: State) -> State:
    return jax.tree.map(np.array, state)


def set_scale(bench: Bench, scale: float, steady: int = 0) -> None:
    old = bench.state.loss_scale
    assert old is not None
    fresh = LossScale(jnp.float32(scale), jnp.int32(steady), jnp.int32(0))
    fresh = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), fresh, old)
    bench.state = bench.state._replace(loss_scale=fresh)


def test_an_overflow_leaves_the_update_out_halves_the_scale_is_counted_and_the_run_goes_on(bench):
    set_scale(bench, 2.0**60)
    before = copied(bench.state)
    told = bench.go(bench.rows(1))
    after = copied(bench.state)
    assert (told["loss_scale"], told["overflows"]) == (2.0**59, 1)
    assert np.isfinite(told["loss"]) and not np.isfinite(told["gradient_norm"])
    for part in ("weights", "moments", "carry"):
        assert eqx.tree_equal(getattr(before, part), getattr(after, part)), part
    # The rows count as consumed: they do not come again.
    assert after.progress.token_hash != before.progress.token_hash
    assert after.progress == before.progress._replace(token_hash=after.progress.token_hash)
    assert int(after.step) == int(before.step) + 1

    set_scale(bench, START)
    told = bench.go(bench.rows(2))
    assert (told["loss_scale"], told["overflows"]) == (START, 0)
    assert np.isfinite(told["gradient_norm"])
    moved = copied(bench.state)
    assert not eqx.tree_equal(after.weights, moved.weights)
    assert moved.loss_scale is not None and int(moved.loss_scale.steady) == 1


def test_a_scale_that_held_for_long_is_doubled(bench):
    set_scale(bench, 512.0, steady=GROWS_AFTER - 2)
    assert bench.go(bench.rows(3))["loss_scale"] == 512
    assert bench.go(bench.rows(4))["loss_scale"] == 1024
    assert int(bench.state.loss_scale.steady) == 0


def test_at_the_floor_a_step_that_is_not_finite_is_a_failure(bench):
    set_scale(bench, 2.0)
    rows = bench.rows(1)
    spoiled = rows | {"weight": rows["weight"] * jnp.nan}
    assert bench.go(spoiled)["loss_scale"] == 1
    assert int(bench.state.progress.not_finite) == 0
    assert bench.go(spoiled)["overflows"] == 1
    assert (int(bench.state.progress.not_finite), int(bench.state.progress.skipped)) == (1, 1)


def test_a_state_in_another_format_holds_nothing_for_a_scale():
    state = Bench("gru", (1, 1, 1), 1).state
    assert state.loss_scale is None and jax.tree.leaves(state.loss_scale) == []
