"""The delta rule in chunks is the recurrence as it is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.analysis.flops import training_flops
from windlass.networks.delta_rule import DeltaInputs, chunked, delta_rule, stepwise, unit_inverse

BATCH, HEADS, GROUP, KEY, VALUE = 2, 2, 3, 8, 6


def inputs(length: int, *, alike: bool = False, seed: int = 0) -> DeltaInputs:
    """Random inputs; keys of length 1, and all the same where they are `alike`."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=(BATCH, length, HEADS, *shape)).astype(np.float32)

    key = draw(KEY)
    key = np.broadcast_to(key[:, :1], key.shape) if alike else key
    norm = np.linalg.norm(key, axis=-1, keepdims=True)
    rate = np.ones((BATCH, length, HEADS, GROUP)) if alike else 1 / (1 + np.exp(draw(GROUP)))
    decay = -np.exp(draw(GROUP)) * (0.01 if alike else 1)
    arrays = draw(KEY), key / norm, draw(GROUP, VALUE), decay, rate
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))


def flags(length: int, begins: tuple[int, ...]) -> jax.Array:
    """Beginnings of documents, of the second row one later."""
    rows = np.zeros((BATCH, length), bool)
    for at in begins:
        rows[0, at], rows[1, min(at + 1, length - 1)] = True, True
    return jnp.asarray(rows)


def start(seed: int = 1) -> jax.Array:
    shape = (BATCH, HEADS, GROUP, KEY, VALUE)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def with_gradients(compute, state, given, begins):
    """The outputs, the last state, and the gradient of a random sum of both."""
    rng = np.random.default_rng(2)

    def total(state, given):
        results = compute(state, given, begins)
        weights = [rng.normal(size=x.shape).astype(np.float32) for x in results]
        return sum(jnp.sum(w * x) for w, x in zip(weights, results, strict=True)), results

    gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
    return jax.jit(gradient)(state, given)


@pytest.mark.parametrize(
    ("length", "begins"),
    [(5, ()), (16, (3,)), (64, (0, 20, 21)), (150, (40, 64, 130)), (128, (63,)), (100, ())],
)
def test_chunks_give_the_outputs_states_and_gradients_of_the_recurrence(length, begins):
    given = start(), inputs(length), flags(length, begins)
    gap = tiny.apart(with_gradients(chunked, *given), with_gradients(stepwise, *given))
    print(f"{length} positions, documents at {begins}: differ by {gap:.1e}")
    assert gap < 1e-5


def test_keys_that_are_alike_and_forget_little_lose_no_precision():
    given = start(), inputs(192, alike=True), flags(192, (70,))
    assert tiny.apart(jax.jit(chunked)(*given), jax.jit(stepwise)(*given)) < 2e-5


def test_decay_to_nothing_has_gradients_that_are_finite():
    given = inputs(70)
    gone = given._replace(log_decay=given.log_decay - 200.0)
    found = with_gradients(chunked, start(), gone, flags(70, (30,)))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


def test_documents_in_a_row_are_as_if_each_were_alone():
    whole, begins, zeros = inputs(90), flags(90, ()).at[:, 37].set(True), jnp.zeros_like(start())
    run = jax.jit(chunked)
    _, together = run(zeros, whole, begins)
    parts = jax.tree.map(lambda x: x[:, :37], whole), jax.tree.map(lambda x: x[:, 37:], whole)
    alone = [run(zeros, part, jnp.zeros(part.key.shape[:2], bool))[1] for part in parts]
    assert tiny.apart(together, jnp.concatenate(alone, axis=1)) < 1e-5


def test_padding_leaves_the_state_alone_in_chunks_and_in_single_steps():
    given, counts = inputs(20), jnp.arange(20)[None].repeat(BATCH, 0) >= 7
    nowhere, run = jnp.zeros((BATCH, 20), bool), jax.jit(delta_rule)
    state, y = run(start(), given, begins=~counts, counts=counts)
    rest = jax.tree.map(lambda x: x[:, 7:], given)
    expected, last = stepwise(start(), rest, nowhere[:, 7:])
    assert tiny.apart((state, y[:, 7:]), (expected, last)) < 1e-5
    for at in range(20):
        one = jax.tree.map(lambda x: x[:, at : at + 1], given)  # noqa: B023
        here = slice(at, at + 1)
        state = start() if at == 0 else state
        state, _ = run(state, one, begins=nowhere[:, here], counts=counts[:, here])
    assert tiny.apart(state, expected) < 1e-5


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_inverse_of_a_unit_triangular_matrix_and_its_gradient(size):
    lower = jnp.tril(jnp.asarray(np.random.default_rng(3).normal(size=(3, size, size))), -1)
    lower = lower.astype(jnp.float32) / 4
    eye = jnp.eye(size)
    found = jax.jit(unit_inverse)(lower)
    assert tiny.apart(found, np.linalg.inv(np.asarray(eye + lower, np.float64))) < 1e-5
    weight = jnp.asarray(np.random.default_rng(4).normal(size=lower.shape), jnp.float32)
    ours = jax.grad(lambda x: jnp.sum(weight * unit_inverse(x)))(lower)
    theirs = jax.grad(lambda x: jnp.sum(weight * jnp.linalg.inv(eye + x)))(lower)
    assert tiny.apart(ours, jnp.tril(theirs, -1)) < 1e-4


def test_every_device_computes_its_own_rows_and_heads():
    given = start(), inputs(40), flags(40, (9,))
    compute = functools.partial(delta_rule, counts=jnp.ones((BATCH, 40), bool))
    run = jax.jit(lambda state, x, begins: compute(state, x, begins=begins))
    with tiny.on((2, 1, 2)):
        found = run(*given)
        assert found[0].sharding.spec[:2] == (("data", "fsdp"), "tensor")
        split = jax.device_get(found)
    assert tiny.apart(split, run(*given)) < 1e-5


def test_flops_are_those_of_the_matmuls_of_every_chunk():
    chunks, size = 3, 64
    of_keys = 2 * (2 * size**2 * KEY)  # of keys with keys, and of queries with them
    solved = 2 * (2 * 32**3) + 2 * 2 * (2 * 16**3)  # corners of the inverse, of two sizes
    in_chunk = solved + 2 * size**2 * (KEY + 2 * VALUE)
    with_state = 3 * (2 * size * KEY * VALUE)
    expected = BATCH * chunks * HEADS * (of_keys + GROUP * (in_chunk + with_state))
    given, begins = (start(), inputs(chunks * size)), flags(chunks * size, ())

    def total(given):
        state, own = given
        return sum(jnp.sum(x) for x in chunked(state, own, begins))

    assert training_flops(lambda _: total(given), None) == expected
    assert training_flops(total, given) == 3 * expected
