"""Readouts in closed form, against least squares written out in NumPy, in double precision."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import tiny
from windlass.analysis.flops import training_flops
from windlass.objectives import Carry
from windlass.objectives.readout import Objective, SecondMoments, updated
from windlass.program.step import Frozen, accumulate, make_step, start

VOCAB = 96
BATCHES = [tiny.rows(VOCAB, seed) for seed in (0, 100, 200)]
FORGETFUL = Objective(solver="rls", forgetting=0.99, targets="embedding")


def after(objective: Objective, model, batches, microbatches: int = 1) -> Carry:
    """The carry after these batches, as a step that trains nothing makes it."""
    arrays, static = eqx.partition(model, eqx.is_array)

    @jax.jit
    def step(arrays, batch, carry):
        def total(_, rows, key, carry):
            call: dict[str, Any] = {"helpers": {}, "step": jnp.int32(0), "steps": 1}
            whole = eqx.combine(arrays, static)
            tally, carry = objective(whole, rows, key=key, carry=carry, **call)
            return tally.total, (tally, carry)

        return accumulate(total, {}, batch, carry, jax.random.key(0), microbatches)[1]

    begin = jax.jit(lambda arrays, batch: objective.start(eqx.combine(arrays, static), batch))
    carry = begin(arrays, batches[0])
    for batch in batches:
        carry = step(arrays, batch, carry)
    return carry


def features(model, batches) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, next tokens and weights of all positions, in the order of rows."""
    hidden = [model(batch)[0] for batch in batches]
    x = np.concatenate([np.asarray(one, np.float64).reshape(-1, one.shape[-1]) for one in hidden])
    y, w = (
        np.concatenate([np.asarray(batch[name]).ravel() for batch in batches])
        for name in ("targets", "weight")
    )
    return x, y, w.astype(np.float64)


def wanted(objective: Objective, model, tokens: np.ndarray) -> np.ndarray:
    table = np.eye(VOCAB)
    if objective.targets == "embedding":
        table = np.asarray(model.embedding.weight, np.float64)
    return table[tokens]


def least_squares(objective: Objective, model, batches) -> np.ndarray:
    """The readout of a ridge regression: W = (√w X; √α I)⁺ (√w Y; 0), transposed."""
    x, tokens, w = features(model, batches)
    y = wanted(objective, model, tokens)
    a = np.concatenate([np.sqrt(w)[:, None] * x, np.sqrt(objective.penalty) * np.eye(x.shape[1])])
    b = np.concatenate([np.sqrt(w)[:, None] * y, np.zeros((x.shape[1], y.shape[1]))])
    return np.linalg.lstsq(a, b, rcond=None)[0].T


def recursion(objective: Objective, model, batches) -> np.ndarray:
    """The readout of recursive least squares by position; one without weight only ages."""
    x, tokens, weights = features(model, batches)
    ys = wanted(objective, model, tokens)
    p, readout = objective.initial * np.eye(x.shape[1]), np.zeros((ys.shape[1], x.shape[1]))
    for x_t, y_t, w_t in zip(x, ys, weights, strict=True):
        x_t, y_t = np.sqrt(w_t) * x_t, np.sqrt(w_t) * y_t
        k = p @ x_t / (objective.forgetting + x_t @ p @ x_t)
        readout = readout + np.outer(y_t - readout @ x_t, k)
        p = (p - np.outer(k, x_t @ p)) / objective.forgetting
    return readout


def head(objective: Objective, model, readout: np.ndarray) -> np.ndarray:
    """The head that gives the logits of a readout."""
    if objective.targets == "embedding":
        readout = np.asarray(model.embedding.weight, np.float64) @ readout
    return readout / objective.temperature


def solved(objective: Objective, model, carry: Carry) -> np.ndarray:
    return np.asarray(eqx.filter_jit(objective.finish)(model, carry).head.weight)


@pytest.mark.parametrize(("of", "targets"), [("gru", "one_hot"), ("frozen", "embedding")])
def test_ridge_is_the_least_squares_of_all_that_was_read(of, targets):
    model = tiny.model(of)
    objective = Objective(penalty=0.5, targets=targets, temperature=0.2)
    carry = after(objective, model, BATCHES)
    expected = head(objective, model, least_squares(objective, model, BATCHES))
    assert tiny.apart(solved(objective, model, carry), expected) < 1e-4


@pytest.mark.parametrize(("forgetting", "microbatches"), [(1.0, 1), (0.99, 4)])
def test_rls_is_the_recursion_over_tokens_in_the_order_of_rows(forgetting, microbatches):
    model = tiny.model("gru")
    objective = Objective(solver="rls", forgetting=forgetting, initial=0.5)
    carry = after(objective, model, BATCHES, microbatches)
    expected = head(objective, model, recursion(objective, model, BATCHES))
    assert tiny.apart(solved(objective, model, carry), expected) < 1e-4


@pytest.mark.parametrize("objective", [Objective(), FORGETFUL], ids=["ridge", "rls"])
def test_a_mesh_gives_the_same_and_no_device_holds_a_whole_sum(objective):
    model = tiny.model("gru")
    alone = jax.tree.map(np.asarray, after(objective, model, BATCHES))
    with tiny.on((2, 2, 2)) as mesh:
        there = [tiny.placed(model, batch, mesh) for batch in BATCHES]
        carry = after(objective, there[0][0], [batch for _, batch in there], 2)
    assert tiny.apart(carry, alone) < 5e-5
    # A square one over data and fsdp, one with an axis of the vocabulary over tensor, too.
    square, other = carry.sums
    assert square.addressable_shards[0].data.size == square.size // 4
    assert other.addressable_shards[0].data.size == other.size // 8


def test_rls_that_forgets_nothing_is_ridge_with_a_penalty_of_one_over_its_initial():
    model, initial = tiny.model("gru"), 0.25
    ridge, rls = Objective(penalty=1 / initial), Objective(solver="rls", initial=initial)
    heads = [solved(one, model, after(one, model, BATCHES)) for one in (ridge, rls)]
    assert tiny.apart(*heads) < 1e-4


def test_features_that_depend_on_each_other_are_solved_for_with_hardly_a_penalty():
    # Half of the features are the other half, so that X Xᵀ has no inverse.
    x = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    x, y = np.concatenate([x, x], axis=1), np.eye(VOCAB, dtype=np.float32)[np.arange(500) % VOCAB]
    model = eqx.tree_at(lambda one: one.head.weight, tiny.model("gru"), jnp.zeros((VOCAB, 16)))
    ridge, rls = Objective(penalty=1e-9), Objective(solver="rls", initial=1e9)
    begun = rls.start(model, BATCHES[0]).sums
    moments = SecondMoments(jnp.asarray(x.T @ x), jnp.asarray(y.T @ x))
    carries = [Carry(sums=moments), Carry(sums=updated(begun, moments))]
    best = np.linalg.lstsq(x.astype(np.float64), y.astype(np.float64), rcond=None)[0]
    least = ((x @ best - y) ** 2).mean()
    for objective, carry in zip((ridge, rls), carries, strict=True):
        readout = solved(objective, model, carry) * objective.temperature
        assert ((x @ readout.T - y) ** 2).mean() == pytest.approx(least, rel=1e-3)


def made(objective: Objective, model):
    """A step that trains nothing, and the state that it begins with."""
    arrays, static = eqx.partition(model, eqx.is_array)
    nothing = jax.tree.map(lambda _: None, arrays)
    optimizer = optax.with_extra_args_support(optax.identity())
    whole = lambda weights, frozen: eqx.combine(weights, frozen, static)  # noqa: E731
    step = make_step(whole, objective, optimizer, steps=9, microbatches=1, skips=0)
    carry = objective.start(model, BATCHES[0])
    state = start(nothing, optimizer, carry, key=jax.random.key(0))
    return step, state, Frozen(arrays, {})


def test_a_step_computes_the_forward_pass_and_the_sums_and_no_more():
    model = tiny.model("gru")
    step, state, frozen = made(Objective(), model)
    assert not jax.tree.leaves((state.weights, state.moments, state.ema))
    found = training_flops(lambda _, *rest: step(*rest), (), state, frozen, BATCHES[0])
    forward = training_flops(lambda _, batch: model(batch)[0], (), BATCHES[0])
    assert found == forward + 2 * 8 * 12 * 32 * 32  # X Xᵀ; Y Xᵀ has no matmul
    arrays = eqx.filter(model, eqx.is_array)
    loss = lambda arrays: tiny.loss(eqx.combine(arrays, model), BATCHES[0])  # noqa: E731
    trained = training_flops(loss, arrays)
    assert trained > 2 * found


def test_rows_that_are_not_finite_leave_the_sums_as_they_were():
    step, state, frozen = made(Objective(), tiny.model("gru"))
    step = jax.jit(step)
    state, told = step(state, frozen, BATCHES[0])
    assert [*told] == ["token_hash"]
    spoiled = BATCHES[1] | {"weight": BATCHES[1]["weight"] * jnp.nan}
    after, _ = step(state, frozen, spoiled)
    assert int(after.progress.not_finite) == 1
    assert eqx.tree_equal(after.carry, state.carry)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"penalty": 0.0}, "penalty is 0; it must be above 0"),
        ({"temperature": -1.0}, "temperature is -1; it must be above 0"),
        (
            {"solver": "rls", "forgetting": 1.1},
            "forgetting is 1.1; it is a share, above 0 and at most 1",
        ),
        ({"initial": 0.1}, "initial is 0.1; it is a key of solver rls, and solver is ridge"),
        (
            {"solver": "rls", "penalty": 2.0},
            "penalty is 2; it is a key of solver ridge, and solver is rls",
        ),
    ],
)
def test_a_key_that_means_nothing_is_refused(keys, what):
    with pytest.raises(ValueError) as refusal:
        Objective(**keys)
    assert refusal.value.args == (what,)
