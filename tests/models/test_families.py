"""What holds for every file in models/, and for every family a stranger adds."""

import dataclasses
import functools
import importlib
import math
from typing import get_args, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tiny
from tests.models.reference import FAMILIES
from windlass.config import section
from windlass.devices.axes import cast, row_axes
from windlass.hub.names import to_tensors
from windlass.layers.dropout import keyed
from windlass.layers.kv_cache import KVCache

# No dead fields


@functools.cache
def initialisation(config) -> str:
    """The program as text, constants included, without running it."""
    arrays = jax.jit(lambda key: eqx.filter(config.init(key), eqx.is_array))
    return arrays.lower(jax.random.key(0)).as_text()


def shapes(config) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tiny.abstract(config)) if hasattr(x, "shape")]


@functools.cache
def training_loss(config) -> str:
    model = tiny.abstract(config)
    shapes, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    batch = tiny.rows(config.vocab)
    # With the keys of dropout, as a step sets them.
    whole = lambda arrays: keyed(eqx.combine(arrays, static), jax.random.key(0))  # noqa: E731
    loss = jax.jit(lambda arrays: tiny.whole_loss(whole(arrays), batch))
    return loss.lower(shapes).as_text()


def numbers(config) -> int:
    """What the model begins as, which no program shows where the host draws it."""
    drawn = jax.jit(lambda key: eqx.filter(config.init(key), eqx.is_array))(jax.random.key(0))
    return hash(tuple(np.asarray(x).tobytes() for x in jax.tree.leaves(drawn)))


def others(config, field: str) -> list:
    """The other values of a field, to be tried: double, opposite, or without it."""
    value = getattr(config, field)
    if hasattr(config, "other"):
        return [config.other(field)]
    if dataclasses.is_dataclass(value):
        return [None]
    if isinstance(value, str):
        words = get_args(get_type_hints(type(config))[field])
        return [word for word in words if word != value]
    return [not value if isinstance(value, bool) else 2 * value]


def is_read(config, field: str) -> bool:
    changed = [dataclasses.replace(config, **{field: value}) for value in others(config, field)]
    return all(
        any(of(config) != of(other) for of in (shapes, training_loss, initialisation, numbers))
        for other in changed
    )


def test_every_field_of_a_config_changes_the_model(family):
    config = tiny.config(family)
    for field in dataclasses.fields(config):
        assert is_read(config, field.name), f"{field.name} is in the config, and unread"


def test_the_search_for_dead_fields_finds_one_and_sees_the_values_of_constants():
    @section
    class Config:
        vocab: int = 96
        dead: float = 1.0
        seed: int = 5

        def init(self, key):
            fixed = np.random.default_rng(self.seed).normal(size=(96, 32)).astype(np.float32)
            model = tiny.config("gru").init(key)
            return eqx.tree_at(lambda m: m.embedding.weight, model, jnp.asarray(fixed))

    assert not is_read(Config(), "dead")
    assert is_read(Config(), "seed")


# No sight of the future


def loss_on_independent_tokens(config, leak=lambda model: model) -> float:
    """The loss, over ln V, on tokens that nothing predicts, after training on such tokens."""
    config = dataclasses.replace(config, vocab=32)
    model = leak(config.init(jax.random.key(0)))
    weights, static = eqx.partition(model, eqx.is_array)
    frame = tiny.packed([tiny.documents(32, lengths) for lengths in [[17], [9, 9], [5, 13]]], 16)
    frame = {name: jnp.tile(column, (4, 1)) for name, column in frame.items()}

    def loss(weights, key):
        tokens = jax.random.randint(key, (12, 17), 0, 32)
        batch = frame | {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        return tiny.loss(eqx.combine(weights, static), batch)

    return tiny.loss_after(loss, weights, rate=1e-2, steps=100) / math.log(32)


class Ahead(eqx.Module):
    """A residual that lets a little of the next position in."""

    def __call__(self, x, branch, context):
        return x + branch(x) + jnp.roll(x, -1, axis=1)


def leaking(model):
    block = lambda model: model.blocks.kinds[0]  # noqa: E731
    where = lambda model: (block(model).attention_residual, block(model).mlp_residual)  # noqa: E731
    return eqx.tree_at(where, model, (Ahead(), Ahead()))


def test_no_family_learns_anything_of_independent_tokens(unlike):
    share = loss_on_independent_tokens(tiny.config(unlike))
    print(f"{unlike}: {share:.4f} of ln V")
    assert share >= 0.98


@pytest.mark.long
def test_a_leak_is_learned_from_independent_tokens():
    share = loss_on_independent_tokens(tiny.config("qwen3"), leaking)
    print(f"leaking: {share:.4f} of ln V")
    assert share < 0.5


def moved(model) -> np.ndarray:
    """Whether changing one token moves another's hidden state: [token changed, state]."""
    batch = tiny.packed([tiny.documents(96, [5, 6])], 11)
    repeated = {name: jnp.tile(column, (12, 1)) for name, column in batch.items()}
    changed = repeated["tokens"].at[jnp.arange(11), jnp.arange(11)].add(1) % 96
    # Nor may it see what it is to predict.
    columns = {"targets": 1 - repeated["targets"], "weight": 2 - repeated["weight"]}
    hidden = eqx.filter_jit(lambda batch: model(batch)[0])
    before, after = hidden(repeated), hidden(repeated | {"tokens": changed} | columns)
    assert jnp.array_equal(before[11], after[11])
    return np.asarray(jnp.any(before != after, axis=-1))[:11]


def test_a_token_moves_no_state_before_it_and_none_of_another_document(causal):
    document = np.array([0] * 4 + [1] * 5 + [-1] * 2)
    same = document[:, None] == document[None, :]
    reached = moved(tiny.model(causal))
    assert not reached[~np.triu(same)].any()
    assert reached.diagonal().all()
    assert reached[np.triu(same) & (document >= 0)].all()


def test_a_token_moves_states_on_both_sides_of_it_and_none_of_another_document(bidirectional):
    document = np.array([0] * 4 + [1] * 5 + [-1] * 2)
    same = document[:, None] == document[None, :]
    reached = moved(tiny.model(bidirectional))
    assert not reached[~same].any()
    assert reached[same & (document >= 0)].all()


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_token_reaches_as_far_as_the_window_of_a_layer_and_no_further(name):
    config = dataclasses.replace(tiny.config(name), layers=1, window=3)
    document, at = np.array([0] * 4 + [1] * 5), np.arange(9)
    back = at[None, :] - at[:, None]
    same = document[:, None] == document[None, :]
    reached = moved(config.init(jax.random.key(0)))[:9, :9]
    assert np.array_equal(reached, same & (back >= 0) & (back < 3))


def test_a_leak_is_seen_by_the_probe():
    reached = moved(leaking(tiny.model("qwen3")))
    assert np.tril(reached, -1).any()


# Packing, generation, precision


def test_packed_and_unpacked_documents_have_the_same_loss(family):
    a, b, c, d = tiny.documents(96, [6, 9, 2, 5])
    loss = eqx.filter_jit(tiny.loss)
    together = loss(tiny.model(family), tiny.packed([[a, b], [c, d]], 13))
    alone = loss(tiny.model(family), tiny.packed([[a], [b], [c], [d]], 8))
    assert abs(together - alone) < 1e-5


PROMPTS = [5, 8, 3, 8]  # their lengths


def turns(texts: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The prompts, padded on the left so that all go on at the same slot; then a token each."""
    prompt = {name: np.zeros((4, 8), np.int32) for name in ("tokens", "position", "document")}
    for row, length in enumerate(PROMPTS):
        prompt["tokens"][row, 8 - length :] = texts[row][:length]
        prompt["position"][row, 8 - length :] = np.arange(length)
        prompt["document"][row, : 8 - length] = -1
    at = np.array(PROMPTS, np.int32)[:, None]
    first = dict(document=np.zeros((4, 1), np.int32))
    return [prompt] + [
        first | dict(tokens=np.stack(texts)[np.arange(4)[:, None], at + i], position=at + i)
        for i in range(4)
    ]


def generated(model, turns) -> list[np.ndarray]:
    """The hidden states of each row, one after another: a prefill, then decode by its cache."""
    step = eqx.filter_jit(lambda model, batch, cache: model(batch, cache)[::2])
    cache, found = KVCache.empty(4, 12), []
    for batch in turns:
        hidden, cache = step(model, batch, cache)
        found.append(np.asarray(hidden))
    rows = np.concatenate(found, axis=1)
    return [row[8 - length :] for row, length in zip(rows, PROMPTS, strict=True)]


@functools.cache
def passed(family: str) -> list[np.ndarray]:
    """The same from one whole pass."""
    batch = tiny.packed([[text] for text in tiny.documents(96, [13] * 4)], 12)
    hidden = eqx.filter_jit(lambda model: model(batch)[0])(tiny.model(family))
    return [np.asarray(row)[: 4 + length] for row, length in zip(hidden, PROMPTS, strict=True)]


def test_prefill_and_decode_equal_whole_passes(causal):
    found = generated(tiny.model(causal), turns(tiny.documents(96, [13] * 4)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, passed(causal))


def test_generation_on_a_mesh_equals_whole_passes_without(causal):
    with tiny.on((2, 2, 2)) as mesh:
        placed = tiny.placed(tiny.model(causal), turns(tiny.documents(96, [13] * 4)), mesh)
        found = generated(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, passed(causal))


def test_a_loss_computed_in_bfloat16_is_close_to_that_in_float32(family):
    def loss(model, batch):
        return tiny.loss(cast(model, "bfloat16"), batch)

    model, batch = tiny.model(family), tiny.rows(96)
    exact = whole(family)[0][0][0]
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes types
        value = eqx.filter_jit(loss)(model, batch)
        gradient = eqx.filter_eval_shape(eqx.filter_grad(loss), model, batch)
    assert 0 < abs(value - exact) < 0.02
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))


# Meshes

REMATERIALISED = "Involuntary full rematerialization"  # the compiler's word for a bad layout


@eqx.filter_jit
def trained(model, batches, rate=0.05):
    """The loss and the norm of its gradient at each of some steps downhill, and what they reach.

    Of steps twice as long smollm3's tiny model makes ten times as much of a rounding.
    """
    weights, static = eqx.partition(model, eqx.is_array)

    def step(weights, batch):
        loss = lambda weights: tiny.loss(eqx.combine(weights, static), batch)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(weights)
        weights = jax.tree.map(lambda x, g: x - rate * g, weights, gradient)
        return weights, (value, optax.tree.norm(gradient))

    weights, curve = jax.lax.scan(step, weights, batches)
    return curve, weights


def ten_batches() -> dict[str, jax.Array]:
    each = [tiny.rows(96, seed=97 * step) for step in range(10)]
    return {name: jnp.stack([batch[name] for batch in each]) for name in each[0]}


@functools.cache
def whole(family: str):
    """Ten steps without a mesh."""
    return trained(tiny.model(family), ten_batches())


def test_ten_steps_are_the_same_on_a_mesh_of_all_three_axes(family, capfd):
    with tiny.on((2, 2, 2)) as mesh:
        model, _ = tiny.placed(tiny.model(family), {}, mesh)
        rows = NamedSharding(mesh, P(None, *row_axes(mesh)))
        curve, weights = trained(model, jax.device_put(ten_batches(), rows))
    assert REMATERIALISED not in capfd.readouterr().err
    np.testing.assert_allclose(curve, whole(family)[0], rtol=1e-5)
    assert tiny.apart(weights, whole(family)[1]) < 1e-5
    for left, right in zip(jax.tree.leaves(weights), jax.tree.leaves(model), strict=True):
        assert left.sharding == right.sharding


def test_an_array_that_a_compiler_must_make_whole_is_said(capfd):
    with tiny.on((2, 2, 2)):
        x = jax.sharding.reshard(jnp.ones((8, 8, 8)), P(("data", "tensor"), None, None))
        jax.jit(lambda x: jax.sharding.reshard(jnp.sin(x), P(None, "tensor", "data")))(x)
    assert REMATERIALISED in capfd.readouterr().err


# Names


def test_a_model_comes_back_from_its_tensors(family):
    module = importlib.import_module(f"windlass.models.{family}")
    names, model = getattr(module, "NAMES", {}), tiny.model(family)
    tensors = to_tensors(model, names)
    empty = tiny.abstract(tiny.config(family))
    assert eqx.tree_equal(tiny.filled(empty, names, tensors), model)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in jax.tree.leaves(model))


@pytest.mark.parametrize("name", ["gemma", "llama"])
def test_pairs_are_reordered_so_that_both_pairings_have_the_same_tensors(name):
    names = importlib.import_module(f"windlass.models.{name}").NAMES
    model, config = tiny.model(name), tiny.config(name)
    half = tiny.abstract(dataclasses.replace(config, pairing="half"))
    hidden = eqx.filter_jit(lambda model: model(tiny.rows(96))[0])

    def gap(table) -> float:
        other = tiny.filled(half, table, to_tensors(model, table))
        return tiny.apart(hidden(other), hidden(model))

    assert gap(names) < 1e-5
    assert gap({}) > 1e-2  # by our own paths nothing is reordered


# Families with experts

SPARSE = [name for name in FAMILIES if "experts" in tiny.config(name).sizes]


@pytest.mark.parametrize("expert", [2, 4])
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.long
def test_ten_steps_are_the_same_with_experts_on_devices_of_their_own(name, expert, capfd):
    with tiny.on((1, 4 // expert, 2), expert) as mesh:
        model, _ = tiny.placed(tiny.model(name), {}, mesh)
        rows = NamedSharding(mesh, P(None, *row_axes(mesh)))
        curve, weights = trained(model, jax.device_put(ten_batches(), rows))
    assert REMATERIALISED not in capfd.readouterr().err
    np.testing.assert_allclose(curve, whole(name)[0], rtol=1e-5)
    assert tiny.apart(weights, whole(name)[1]) < 1e-5
    gate = weights.blocks.kinds[0].mlp.experts.maps[0].weight
    assert gate.sharding.shard_shape(gate.shape)[1] == 8 // expert


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("mixtral", "qwen3_moe") else pytest.param(name, marks=pytest.mark.long)
        for name in SPARSE
    ],
)
def test_generation_with_experts_on_devices_of_their_own_equals_whole_passes(name):
    with tiny.on((1, 1, 2), 4) as mesh:
        placed = tiny.placed(tiny.model(name), turns(tiny.documents(96, [13] * 4)), mesh)
        found = generated(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, passed(name))
