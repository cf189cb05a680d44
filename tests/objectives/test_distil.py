"""Distillation from cached and live logits, against torch's kl_div and written-out sums."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models.reference import HAS_TORCH
from windlass.adapters.lora import Adapter
from windlass.config.start import Start
from windlass.errors import UserError
from windlass.layers.embedding import Embedding
from windlass.layers.head import Head
from windlass.objectives import Carry, Tally
from windlass.objectives.distil import READ, Objective

VOCAB = tiny.config("gru").vocab
KEY = jax.random.key(0)


def live(**keys) -> Objective:
    return Objective(teacher=Start(path="somewhere"), **keys)


@eqx.filter_jit
def call(objective, model, batch, teacher=None, carry=None, step=0, steps=11, key=None):
    helpers = {} if teacher is None else {"teacher": teacher}
    given = {"helpers": helpers, "step": jnp.int32(step), "steps": steps, "key": key}
    return objective(model, batch, carry=Carry() if carry is None else carry, **given)


def tally(objective, model, batch, teacher=None, **given) -> Tally:
    return call(objective, model, batch, teacher, **given)[0]


def loss(objective, model, batch, teacher=None, **given):
    found = tally(objective, model, batch, teacher, **given)
    return found.total / found.weight


@eqx.filter_jit
def gradient(objective, model, batch, teacher=None):
    return loss_and_gradient(objective, model, batch, teacher)[1]


@eqx.filter_jit
def loss_and_gradient(objective, model, batch, teacher=None):
    return eqx.filter_value_and_grad(lambda model: loss(objective, model, batch, teacher))(model)


class Bigram(eqx.Module):
    """A model that sees no token but the last one: all that the objective needs of one."""

    embedding: Embedding
    head: Head

    def __init__(self, seed: int, strength: float):
        one, two = jax.random.split(jax.random.key(seed))
        sizes = {"vocab": VOCAB, "embed": 16}
        self.embedding = Embedding(sizes, key=one)
        self.head = Head(strength * jax.random.normal(two, (VOCAB, 16)))

    def __call__(self, batch):
        return 10 * self.embedding(batch["tokens"]), {}, None


def student() -> Bigram:
    return Bigram(0, strength=1.0)


def teacher() -> Bigram:
    """Another model of the same vocabulary, with opinions of some strength."""
    return Bigram(1, strength=2.0)


def logits_of(model, batch) -> np.ndarray:
    return np.asarray(_logits(model, {name: batch[name] for name in READ}), np.float64)


@eqx.filter_jit
def _logits(model, batch):
    return model.head.logits(model(batch)[0])


def cached(logits: np.ndarray, candidates: int) -> dict[str, jax.Array]:
    """The columns that a cache has of a teacher's logits."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :candidates]
    return {
        "teacher_ids": jnp.asarray(ids, jnp.int32),
        "teacher_logits": jnp.asarray(np.take_along_axis(logits, ids, -1), jnp.float32),
        "teacher_log_z": jnp.asarray(log_sum(logits), jnp.float32),
    }


def log_sum(x: np.ndarray) -> np.ndarray:
    top = x.max(-1, keepdims=True)
    return np.log(np.exp(x - top).sum(-1)) + top[..., 0]


def divergence(taught: np.ndarray, learned: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """T² KL of two distributions, of each position."""
    log_p = taught / temperature - log_sum(taught / temperature)[..., None]
    log_q = learned / temperature - log_sum(learned / temperature)[..., None]
    return temperature**2 * (np.exp(log_p) * (log_p - log_q)).sum(-1)


def mean(values: np.ndarray, batch) -> float:
    weight = np.asarray(batch["weight"], np.float64)
    return float((values * weight).sum() / weight.sum())


@pytest.mark.parametrize("tail", ["bucket", pytest.param("drop", marks=pytest.mark.long)])
def test_with_all_of_the_vocabulary_cached_the_loss_is_the_full_divergence(tail):
    batch, model = tiny.rows(VOCAB), student()
    taught = logits_of(teacher(), batch)
    objective = Objective(tail=tail, temperature=1.5)
    found = loss(objective, model, batch | cached(taught, VOCAB))
    expected = mean(divergence(taught, logits_of(model, batch), 1.5), batch)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    alive = loss(live(temperature=1.5), model, batch, teacher())
    assert float(alive) == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not HAS_TORCH, reason="compares with torch")
@pytest.mark.parametrize("kind", ["kl", "soft_cross_entropy"])
def test_temperature_and_its_square_are_as_with_torch(kind):
    import torch
    from torch.nn import functional

    batch, model, temperature, k = tiny.rows(VOCAB), student(), 2.0, 16
    columns = cached(logits_of(teacher(), batch), k)
    learned = torch.tensor(logits_of(model, batch), requires_grad=True)
    ids = torch.tensor(np.asarray(columns["teacher_ids"])).long()
    taught = torch.tensor(np.asarray(columns["teacher_logits"])).double()
    log_q = functional.log_softmax(learned.gather(-1, ids) / temperature, -1)
    p = functional.softmax(taught / temperature, -1)
    if kind == "kl":
        each = functional.kl_div(log_q, p, reduction="none").sum(-1)
    else:
        each = -(p * log_q).sum(-1)
    weight = torch.tensor(np.asarray(batch["weight"])).double()
    expected = temperature**2 * (each * weight).sum() / weight.sum()
    expected.backward()
    objective = Objective(temperature=temperature, tail="drop", loss=kind)
    assert float(loss(objective, model, batch | columns)) == pytest.approx(
        expected.item(), rel=1e-6
    )
    # The gradient of the head's matrix is that of the logits, with the hidden states.
    hidden = np.asarray(model(batch)[0], np.float64)
    assert learned.grad is not None
    by_hand = np.einsum("bsv,bse->ve", learned.grad.numpy(), hidden)
    found = gradient(objective, model, batch | columns).head.weight
    assert tiny.apart(found, by_hand) < 1e-5


def test_a_uniform_tail_gives_the_full_divergence_at_any_temperature():
    batch, model, k = tiny.rows(VOCAB), student(), 8
    taught = flattened(logits_of(teacher(), batch), k)
    learned = logits_of(model, batch)
    for temperature in (1.0, 2.0):
        objective = Objective(tail="uniform", temperature=temperature)
        found = loss(objective, model, batch | cached(taught, k))
        expected = mean(divergence(taught, learned, temperature), batch)
        assert float(found) == pytest.approx(expected, rel=2e-6)


def test_a_bucket_is_the_divergence_with_all_other_tokens_as_one():
    batch, model, k = tiny.rows(VOCAB), student(), 8
    taught, learned = logits_of(teacher(), batch), logits_of(model, batch)
    ids = np.argsort(-taught, axis=-1, kind="stable")

    def bucketed(logits: np.ndarray) -> np.ndarray:
        ordered = np.take_along_axis(logits, ids, -1)
        return np.concatenate([ordered[..., :k], log_sum(ordered[..., k:])[..., None]], axis=-1)

    found = loss(Objective(tail="bucket"), model, batch | cached(taught, k))
    expected = mean(divergence(bucketed(taught), bucketed(learned)), batch)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def flattened(logits: np.ndarray, k: int) -> np.ndarray:
    """Logits of which all but the k largest are equal, with the same mass."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    ordered = np.take_along_axis(logits, order, -1)
    ordered[..., k:] = (log_sum(ordered[..., k:]) - np.log(logits.shape[-1] - k))[..., None]
    np.put_along_axis(flat := np.empty_like(logits), order, ordered, -1)
    return flat


@pytest.mark.parametrize("tail", ["drop", "bucket"])
def test_a_student_that_equals_its_teacher_has_no_gradient(tail):
    batch, model, k = tiny.rows(VOCAB), student(), 8
    logits = logits_of(model, batch)
    objective = Objective(tail=tail, temperature=2.0)
    columns = cached(logits, k)
    found = gradient(objective, model, batch | columns)
    other = gradient(objective, model, batch | cached(logits_of(teacher(), batch), k))
    assert largest(found) < 1e-5 * largest(other)
    assert float(loss(objective, model, batch | columns)) == pytest.approx(0, abs=1e-6)


def test_a_student_that_equals_its_live_teacher_has_no_gradient():
    batch, model = tiny.rows(VOCAB), student()
    same, other = (gradient(live(), model, batch, one) for one in (model, teacher()))
    assert largest(same) < 1e-5 * largest(other)


def largest(tree) -> float:
    return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))


def test_hard_terms_are_annealed_over_the_steps_of_the_run():
    batch, model = tiny.rows(VOCAB), student()
    taught, learned = logits_of(teacher(), batch), logits_of(model, batch)
    log_q = learned - log_sum(learned)[..., None]
    best = -np.take_along_axis(log_q, taught.argmax(-1)[..., None], -1)[..., 0]
    target = -np.take_along_axis(log_q, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    keys: dict[str, Any] = {"weight": 0.0, "hard": 0.4, "hard_end": 0.0, "cross_entropy": 0.1}
    for objective, given in (
        (Objective(**keys), (batch | cached(taught, 4), None)),
        (live(**keys), (batch, teacher())),
    ):
        for step, hard in ((0, 0.4), (5, 0.2), (10, 0.0)):
            found = loss(objective, model, *given, step=step, steps=11)
            expected = mean(hard * best + 0.1 * target, batch)
            assert float(found) == pytest.approx(expected, rel=1e-5)


def test_candidates_that_are_none_change_nothing():
    batch, model = tiny.rows(VOCAB), student()
    columns = cached(logits_of(teacher(), batch), 6)
    more = columns | {
        "teacher_ids": jnp.pad(columns["teacher_ids"], [(0, 0), (0, 0), (0, 2)]),
        "teacher_logits": jnp.pad(
            columns["teacher_logits"], [(0, 0), (0, 0), (0, 2)], constant_values=-jnp.inf
        ),
    }
    for tail in ("bucket", "uniform"):
        objective = Objective(tail=tail)
        one, other = (loss(objective, model, batch | x) for x in (columns, more))
        assert float(one) == pytest.approx(float(other), rel=1e-6)
        grads = gradient(objective, model, batch | more)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", ["cached", pytest.param("live", marks=pytest.mark.long)])
def test_on_eight_devices_loss_and_gradient_are_those_of_one(kind):
    model, taught, batch = student(), teacher(), tiny.rows(VOCAB)
    objective = Objective(hard=0.1, temperature=2.0) if kind == "cached" else live(hard=0.1)
    both = batch | cached(logits_of(taught, batch), 8)
    plain = loss_and_gradient(objective, model, both, taught)
    with tiny.on((2, 2, 2)) as mesh:
        placed, rows = tiny.placed(model, both, mesh)
        spread = loss_and_gradient(objective, placed, rows, tiny.placed(taught, both, mesh)[0])
    assert tiny.apart(spread, plain) < 1e-5


def adapted():
    return tiny.made(tiny.config("gru"), Adapter(rank=2))


def test_an_anchor_pulls_adapters_towards_the_model_without_them():
    from windlass.adapters import plain

    model, batch = adapted(), tiny.rows(VOCAB)
    objective = live(anchor=0.5, anchor_sequences=3, weight=0.0)
    carry = eqx.filter_jit(objective.start)(model, batch)
    rows = [0, 1, 2, 0]
    for turn, row in enumerate(rows):
        found, carry = call(objective, model, batch, teacher(), carry=carry, key=KEY)
        one = {name: x[row : row + 1] for name, x in batch.items()}
        base, now = logits_of(plain(model), one), logits_of(model, one)
        log_q = now - log_sum(now)[..., None]
        p = np.exp(base - log_sum(base)[..., None])
        is_token = np.asarray(one["document"]) >= 0
        expected = -(p * log_q).sum(-1)[is_token].mean()
        assert float(found.metrics()["anchor"]) == pytest.approx(expected, rel=1e-5), turn
        assert float(found.total / found.weight) == pytest.approx(0.5 * expected, rel=1e-5)
    assert "anchor" not in tally(objective, model, batch, teacher(), carry=carry).metrics()


def test_an_anchor_without_an_adapter_to_take_off_is_refused():
    with pytest.raises(UserError, match=r"objective\.anchor is 0\.1, which compares the model"):
        Objective(anchor=0.1).start(student(), tiny.rows(VOCAB))


def test_metrics_have_divergence_cross_entropy_and_agreement():
    batch, model = tiny.rows(VOCAB), student()
    taught, learned = logits_of(teacher(), batch), logits_of(model, batch)
    found = tally(Objective(tail="drop", hard=0.3), model, batch | cached(taught, VOCAB)).metrics()
    same = (taught.argmax(-1) == learned.argmax(-1)).astype(float)
    assert float(found["agreement"]) == pytest.approx(mean(same, batch))
    expected = mean(divergence(taught, learned), batch)
    assert float(found["divergence"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0; it must be above 0"),
        ({"hard": -1.0}, "hard is -1; it is a weight, 0 or more"),
        ({"cross_entropy_end": -0.5}, "cross_entropy_end is -0.5; it is a weight, 0 or more"),
        ({"anchor_sequences": 0}, "anchor_sequences is 0; it must be 1 or more"),
    ],
)
def test_impossible_numbers_are_refused(keys, message):
    with pytest.raises(ValueError) as refused:
        Objective(**keys)
    assert refused.value.args == (message,)


def test_a_live_teacher_needs_no_column_of_a_cache():
    assert live().reads == ("tokens", "targets", "weight", "position", "document")
    assert set(Objective().reads) - set(live().reads) == {
        *("teacher_ids", "teacher_logits", "teacher_log_z")
    }
