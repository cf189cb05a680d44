"""The head computes what a plain softmax over all words would, without ever holding all words."""

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass.devices.axes import shard
from windlass.layers.head import Head, outside, pick_several, top_k
from windlass.layers.softmax import log_z, pick

ROWS, LENGTH, EMBED = 4, 7, 16
MESH = (2, 2, 2)


def example(vocab: int):
    """Hidden states, a weight and uneven columns."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)
    weight = rng.normal(size=(vocab, EMBED)).astype(np.float32) / 2
    columns = {
        "targets": rng.integers(vocab, size=(ROWS, LENGTH)).astype(np.int32),
        "weight": rng.choice([0, 0.5, 1, 2], size=(ROWS, LENGTH)).astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, (hidden, weight, columns))


# Each loss twice: of one tile's logits, as an objective writes it, and plainly.


def entropy(logits, columns):
    z = log_z(logits)
    smooth = 0.9 * pick(logits, columns["targets"]) + 0.1 * jnp.mean(logits, axis=-1)
    return (z - smooth + 0.01 * z**2) * columns["weight"], {"z": z * columns["weight"]}


def plain_entropy(logits, columns):
    z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    chosen = jnp.take_along_axis(logits, columns["targets"][..., None], axis=-1)[..., 0]
    each = 0.9 * (z - chosen) + 0.1 * (z - logits.mean(-1)) + 0.01 * z**2
    return jnp.sum(each * columns["weight"]), {"z": jnp.sum(z * columns["weight"])}


def soft(logits, columns):
    z = log_z(logits)
    each = z - jnp.sum(logits * columns["teacher"], axis=-1)
    return each * columns["weight"], {"z": z * columns["weight"]}


def plain_soft(logits, columns):
    log_p = jax.nn.log_softmax(logits)
    each = -jnp.sum(log_p * columns["teacher"], axis=-1)
    z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return jnp.sum(each * columns["weight"]), {"z": jnp.sum(z * columns["weight"])}


def several(logits, columns):
    z = log_z(logits)
    log_p = pick_several(logits, columns["candidates"]) - z[..., None]
    each = -jnp.sum(log_p * columns["share"], axis=-1)
    return each * columns["weight"], {"z": z * columns["weight"]}


def plain_several(logits, columns):
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), columns["candidates"], axis=-1)
    each = -jnp.sum(log_p * columns["share"], axis=-1)
    z = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return jnp.sum(each * columns["weight"]), {"z": jnp.sum(z * columns["weight"])}


def plainly(loss, hidden, weight, columns):
    """The sums, and the gradients of a third of the loss."""

    def third(hidden, weight):
        total, sums = loss(jnp.einsum("bse,ve->bsv", hidden, weight), columns)
        return total / 3, (total, sums)

    gradients, sums = jax.jit(jax.grad(third, (0, 1), has_aux=True))(hidden, weight)
    return sums, gradients


def tiled(loss, hidden, weight, columns, *, rows: int):
    """The same by the head, in tiles of 3 positions of each device's rows: 7 is not of those."""

    def third(hidden, head):
        total, sums = head.reduce(loss, hidden, columns, tile_tokens=3 * rows)
        return total / 3, (total, sums)

    (d_hidden, d_head), sums = jax.jit(jax.grad(third, (0, 1), has_aux=True))(hidden, Head(weight))
    return sums, (d_hidden, d_head.weight)


def check(loss, plain, hidden, weight, columns):
    """On one device and on eight, with and without a gradient."""
    expected = plainly(plain, hidden, weight, columns)
    assert tiny.apart(tiled(loss, hidden, weight, columns, rows=ROWS), expected) < 1e-5
    alone = jax.jit(lambda h, w: Head(w).reduce(loss, h, columns, tile_tokens=3 * ROWS))
    assert tiny.apart(alone(hidden, weight), expected[0]) < 1e-5
    with tiny.on(MESH) as mesh:
        head, (hidden, columns) = tiny.placed(Head(weight), (hidden, columns), mesh)
        found = tiled(loss, hidden, head.weight, columns, rows=1)
        assert tiny.apart(found, expected) < 1e-5
        assert found[1][1].sharding == head.weight.sharding


@pytest.mark.parametrize("vocab", [151_936, 50_257, 3_001])
def test_loss_and_gradients_are_those_of_a_plain_computation(vocab):
    check(entropy, plain_entropy, *example(vocab))


@pytest.mark.parametrize("vocab", [3_000, 3_001])
def test_soft_targets_over_all_words_go_through_the_same_tiles(vocab):
    hidden, weight, columns = example(vocab)
    logits = np.random.default_rng(1).normal(size=(ROWS, LENGTH, vocab)).astype(np.float32)
    columns = columns | {"teacher": jax.nn.softmax(jnp.asarray(2 * logits))}
    check(soft, plain_soft, hidden, weight, columns)


@pytest.mark.parametrize("vocab", [3_000, 3_001])
def test_a_few_candidates_for_each_token_go_through_the_same_tiles(vocab):
    hidden, weight, columns = example(vocab)
    rng = np.random.default_rng(1)
    candidates = np.stack([rng.permutation(vocab)[:5] for _ in range(ROWS * LENGTH)])
    columns = columns | {
        "candidates": jnp.asarray(candidates.reshape(ROWS, LENGTH, 5).astype(np.int32)),
        "share": jnp.asarray(rng.uniform(size=(ROWS, LENGTH, 5)).astype(np.float32)),
    }
    check(several, plain_several, hidden, weight, columns)


@pytest.mark.parametrize("vocab", [3_000, 3_001])
def test_log_probabilities_of_targets_and_their_gradients_are_those_of_a_log_softmax(vocab):
    hidden, weight, columns = example(vocab)
    targets, scale = columns["targets"], columns["weight"]

    def squares(log_p):
        """Something whose gradient is another one at every token."""
        return jnp.sum(scale * log_p**2), log_p

    def plain(hidden, weight):
        every = jax.nn.log_softmax(jnp.einsum("bse,ve->bsv", hidden, weight))
        return squares(jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0])

    def by_head(hidden, weight, *, rows: int):
        head = Head(weight)
        return squares(head.log_probabilities(hidden, targets, tile_tokens=3 * rows))

    def gradient(function, *given):
        return jax.jit(jax.grad(function, (0, 1), has_aux=True))(*given)

    expected = gradient(plain, hidden, weight)
    assert tiny.apart(gradient(partial(by_head, rows=ROWS), hidden, weight), expected) < 1e-5
    with tiny.on(MESH) as mesh:
        head, given = tiny.placed(Head(weight), (hidden, targets, scale), mesh)
        hidden, targets, scale = given
        found = gradient(partial(by_head, rows=1), hidden, head.weight)
        assert tiny.apart(found, expected) < 1e-5
        assert found[0][1].sharding == head.weight.sharding


def probabilities(head, hidden, columns):
    return jnp.sum(head.log_probabilities(hidden, columns["targets"]) * columns["weight"])


def reduced(head, hidden, columns):
    return head.reduce(entropy, hidden, columns)[0]


@pytest.mark.parametrize("loss", [reduced, probabilities])
def test_of_a_frozen_weight_no_gradient_is_computed_nor_summed_over_devices(loss):
    hidden, weight, columns = example(3_000)
    with tiny.on(MESH) as mesh:
        head, (hidden, columns) = tiny.placed(Head(weight), (hidden, columns), mesh)

        def sums(which):
            gradient = jax.grad(lambda h, w: loss(Head(w), h, columns), which)
            text = jax.jit(gradient).lower(hidden, head.weight).as_text()
            return text.count("stablehlo.reduce_scatter"), text.count("stablehlo.dot_general")

        (trained, products), (frozen, fewer) = sums((0, 1)), sums(0)
        assert trained == 1 and frozen == 0
        assert products == fewer + 1


# What is never held


def largest(compiled) -> int:
    """The number of elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(int(size) for size in shape.split(",")) for shape in shapes)


def test_the_compiled_loss_and_gradient_hold_no_array_of_tokens_by_words():
    config = dataclasses.replace(tiny.config("qwen3"), vocab=151_936)
    model = tiny.abstract(config)
    shapes, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    rows, length = 4, 2048
    batch = {
        name: jax.ShapeDtypeStruct((rows, length), x.dtype) for name, x in tiny.rows(96).items()
    }

    def plain(model, batch):
        logits = model.head.logits(model(batch)[0])
        return plain_entropy(logits, batch)[0]

    def compiled(loss):
        combined = jax.value_and_grad(lambda x, batch: loss(eqx.combine(x, static), batch))
        return jax.jit(combined).lower(shapes, batch).compile()

    assert largest(compiled(tiny.loss)) < rows * length * config.vocab
    assert largest(compiled(plain)) >= rows * length * config.vocab


# Low precision


def products(jaxpr) -> Iterator:
    """Every matrix product of a program, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def test_in_bfloat16_every_product_of_a_tile_is_in_bfloat16_and_gradients_are_close():
    hidden, weight, columns = example(3_001)

    def run(hidden, weight):
        return tiled(entropy, hidden, weight, columns, rows=ROWS)

    low = hidden.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    found = list(products(jax.make_jaxpr(run)(*low).jaxpr))
    assert len(found) == 3  # logits, and the gradients of both their factors
    assert {str(x.aval.dtype) for each in found for x in each.invars} == {"bfloat16"}

    (total, _), gradients = run(*low)
    (exact, _), expected = plainly(plain_entropy, hidden, weight, columns)
    assert abs(total / exact - 1) < 1e-3
    gap = tiny.apart(jax.tree.map(lambda g: g.astype(jnp.float32), gradients), expected)
    print(f"gradients differ by {gap:.1e}")
    assert gap < 1e-2


def test_in_float16_gradients_beyond_its_range_are_kept_for_the_scale_that_comes_later():
    hidden, weight, columns = example(3_001)
    faint = columns | {"weight": 1e-7 * columns["weight"]}
    low = hidden.astype(jnp.float16), weight.astype(jnp.float16)

    def scaled(hidden, head):
        return 1e7 * head.reduce(entropy, hidden, faint, tile_tokens=3 * ROWS)[0]

    d_hidden, d_head = jax.jit(jax.grad(scaled, (0, 1)))(low[0], Head(low[1]))
    assert d_hidden.dtype == d_head.weight.dtype == jnp.float16
    _, expected = plainly(plain_entropy, hidden, weight, columns)
    found = jax.tree.map(lambda g: g.astype(jnp.float32) / 3, (d_hidden, d_head.weight))
    gap = tiny.apart(found, expected)
    print(f"gradients differ by {gap:.1e}")
    assert gap < 5e-3


@pytest.mark.parametrize("vocab", [3_000, 3_001])  # split over devices, and not
def test_candidates_are_the_highest_logits_and_others_outside_of_them_on_any_mesh(vocab):
    hidden, weight, _ = example(vocab)
    rng = np.random.default_rng(2)
    ranks = np.stack([rng.permutation(vocab - 5)[:3] for _ in range(ROWS * LENGTH)])
    ranks = jnp.asarray(ranks.reshape(ROWS, LENGTH, 3).astype(np.int32))

    logits = np.einsum("bse,ve->bsv", *(np.asarray(x, np.float64) for x in (hidden, weight)))
    highest = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    rest = [np.delete(np.arange(vocab), ids) for ids in highest.reshape(-1, 5)]
    others = np.stack(rest).reshape(ROWS, LENGTH, -1)
    expected = np.concatenate(
        [highest, np.take_along_axis(others, np.asarray(ranks), axis=-1)], axis=-1
    )

    def by_head(hidden, head, ranks, *, rows: int):
        return head.candidates(hidden, 5, ranks, tile_tokens=3 * rows)

    alone = jax.jit(partial(by_head, rows=ROWS))(hidden, Head(weight), ranks)
    with tiny.on(MESH) as mesh:
        head, (hidden, ranks) = tiny.placed(Head(weight), (hidden, ranks), mesh)
        spread = jax.jit(partial(by_head, rows=1))(hidden, head, ranks)
    for found in (alone, spread):
        np.testing.assert_array_equal(found.ids, expected)
        np.testing.assert_allclose(
            found.logits, np.take_along_axis(logits, expected, axis=-1), atol=1e-5
        )
        np.testing.assert_allclose(found.log_z, np.log(np.exp(logits).sum(axis=-1)), atol=1e-5)


def test_equal_logits_are_ordered_by_id_on_any_mesh():
    logits = jnp.zeros((4, 1, 2, 16)).at[..., jnp.array([3, 9, 12])].set(1.0)
    alone = top_k(logits, 9)
    with tiny.on(MESH):
        spread = jax.jit(lambda x: top_k(shard(x, "batch . . vocab"), 9))(logits)
    for ids, values in (map(np.asarray, found) for found in (alone, spread)):
        np.testing.assert_array_equal(ids[0, 0, 0], [3, 9, 12, 0, 1, 2, 4, 5, 6])
        np.testing.assert_array_equal(values[0, 0, 0], [1] * 3 + [0] * 6)


def test_equal_logits_of_many_groups_are_ordered_by_id():
    rng = np.random.default_rng(3)
    logits = rng.integers(0, 40, size=(2, 3, 5_000)).astype(np.float32)  # of which most are equal
    for k in (1, 7, 30):
        ids, values = jax.jit(partial(top_k, k=k))(jnp.asarray(logits))
        expected = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=-1))


def test_ranks_outside_of_a_set_are_ids_that_are_not_in_it():
    ids = jnp.array([5, 0, 2], jnp.int32)
    np.testing.assert_array_equal(outside(ids, jnp.arange(5, dtype=jnp.int32)), [1, 3, 4, 6, 7])
