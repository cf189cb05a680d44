"""The step: the same gradient however a batch is divided, and no change without a finite one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from tests.training.bench import Bench, batch
from windlass.objectives import Carry
from windlass.objectives.next_token import Objective
from windlass.program import token_hash
from windlass.program.step import State, accumulate

# Of the eight heads on the third of them each device has one, and of two key heads a copy.
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 4, 2)]


@pytest.fixture(scope="module")
def on_one_device() -> np.ndarray:
    return Bench("qwen3", (1, 1, 1), 1).curve()


# All three axes at once in microbatches, and each alone: `make proof` has all of every family.
@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    [
        (MESHES[4], 2),
        *(pytest.param(sizes, 1, marks=pytest.mark.long) for sizes in MESHES[1:4]),
    ],
)
def test_every_mesh_gives_the_same_losses_and_gradient_norms(
    sizes, microbatches, on_one_device, capfd
):
    found = Bench("qwen3", sizes, microbatches).curve()
    np.testing.assert_allclose(found, on_one_device, rtol=1e-5)
    # The compiler says so on the standard error when it copies an array to every device because
    # it finds no better way.
    assert "nvoluntary" not in capfd.readouterr().err


@pytest.mark.long
def test_a_single_key_head_is_trained_the_same_on_a_mesh():
    found, expected = (Bench("qwen3", each, 1, kv_heads=1).curve() for each in MESHES[3::-3])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_accumulation_gives_the_same_gradient_whatever_the_weights_of_its_microbatches():
    model = tiny.model("qwen3")
    arrays, static = eqx.partition(model, eqx.is_array)
    rows = batch(0, tiny.config("qwen3").vocab)
    # Rows of a microbatch are those of equal remainder: give each remainder another share.
    share = jnp.asarray([1.0, 0.1, 0.0, 2.0])[jnp.arange(16) % 4][:, None]
    rows["weight"] = rows["weight"] * share

    def total(weights, rows, key, carry):
        found, carry = Objective()(
            eqx.combine(weights, static),
            rows,
            key=key,
            carry=carry,
            helpers={},
            step=jnp.int32(0),
            steps=1,
        )
        return found.total, (found, carry)

    found = {}
    for microbatches in (1, 2, 4):
        tally, _, gradient = jax.jit(accumulate, static_argnums=(0, 5))(
            total, arrays, rows, Carry(), jax.random.key(0), microbatches
        )
        found[microbatches] = jax.tree.map(lambda g, w=tally.weight: g / w, gradient)
    norm = optax.tree.norm(found[1])
    for microbatches in (2, 4):
        off = jax.tree.map(jnp.subtract, found[microbatches], found[1])
        assert float(optax.tree.norm(off) / norm) < 2e-6


def spoiled(rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return rows | {"weight": rows["weight"] * jnp.nan}


def copied(state: State) -> State:
    return jax.tree.map(lambda x: np.array(x), state)


def test_a_step_that_is_not_finite_changes_nothing_and_no_step_after_it_does():
    bench = Bench("llama", (1, 1, 1), 1)
    bench.go(bench.rows(0))
    before = copied(bench.state)
    bench.go(spoiled(bench.rows(1)))
    bench.go(bench.rows(2))
    after = copied(bench.state)
    assert int(after.progress.not_finite) == 1 and int(after.step) == int(before.step) + 1
    for part in ("weights", "moments", "carry", "key"):
        assert eqx.tree_equal(getattr(before, part), getattr(after, part))
    # The rows of the step that was not finite were consumed, and those after it were not.
    consumed = jnp.asarray(before.progress.token_hash)
    spoilt = token_hash.with_batch(consumed, bench.rows(1), ["tokens"])
    assert after.progress.token_hash == spoilt


def test_skipping_goes_on_after_a_step_that_is_not_finite_up_to_so_many_in_a_row():
    bench = Bench("llama", (1, 1, 1), 1, skips=2)
    before = copied(bench.state)
    bench.go(spoiled(bench.rows(0)))
    bench.go(spoiled(bench.rows(1)))
    assert eqx.tree_equal(before.weights, copied(bench.state).weights)
    bench.go(bench.rows(2))
    progress = copied(bench.state).progress
    assert (int(progress.not_finite), int(progress.skipped)) == (0, 2)
    assert not eqx.tree_equal(before.weights, copied(bench.state).weights)
    for step in range(4):
        bench.go(spoiled(bench.rows(step)))
    stopped = copied(bench.state)
    assert int(stopped.progress.not_finite) == 3 and int(stopped.step) == 6
    bench.go(bench.rows(9))
    assert eqx.tree_equal(stopped, copied(bench.state))


def test_the_average_is_that_of_the_weights_of_each_step_and_leaves_out_those_not_finite():
    bench = Bench("llama", (1, 2, 1), 1, skips=1, ema=0.3)
    expected = copied(bench.state).weights
    for step, kept in enumerate([1 / 10, 2 / 11, 3 / 12, 0.3, 0.3, 0.3]):
        is_spoiled = step == 2
        bench.go(spoiled(bench.rows(step)) if is_spoiled else bench.rows(step))
        if not is_spoiled:
            expected = jax.tree.map(
                lambda a, w, kept=kept: kept * a + (1 - kept) * w,
                expected,
                copied(bench.state).weights,
            )
    found = copied(bench.state)
    assert tiny.apart(found.ema, expected) < 1e-6
    assert tiny.apart(found.ema, found.weights) > 1e-4
    places = jax.tree.map(lambda x: x.sharding, (bench.state.ema, bench.state.weights))
    assert places[0] == places[1]


def test_a_batch_with_nothing_to_train_on_is_no_reason_to_stop():
    bench = Bench("llama", (1, 1, 1), 1)
    rows = bench.rows(0)
    told = bench.go(rows | {"weight": jnp.zeros_like(rows["weight"])})
    assert told["gradient_norm"] == 0 and int(bench.state.progress.not_finite) == 0
