"""Losses on pairs and on labelled answers, against the formulas of TRL in torch, each alone."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models import reference
from tests.objectives.test_preference import CASE, batch, pairs, references
from windlass.hub.names import to_tensors
from windlass.objectives import Carry, ipo, kto, orpo, simpo

BETA, GAMMA, SMOOTHING = 0.3, 0.7, 0.1
LABELS = (True, False, True)  # of the first answer of each pair, where the second is another's
UP, DOWN = 1.3, 0.8
FURTHER = 4.0  # nats a target below what pairs have, so that the divergence is above 0


class Answers(NamedTuple):
    """Log-probabilities of each target of one answer of every pair, in torch."""

    log_p: list[Any]
    reference: list[Any]
    whole: list[Any]  # of the prompt too

    @property
    def totals(self) -> Any:
        return _stacked([one.sum() for one in self.log_p])

    @property
    def means(self) -> Any:
        return _stacked([one.mean() for one in self.log_p])

    @property
    def gains(self) -> Any:
        return self.totals - _stacked([one.sum() for one in self.reference])

    @property
    def sizes(self) -> Any:
        return _stacked([one.new_tensor(len(one)) for one in self.log_p])


def _stacked(values):
    import torch

    return torch.stack(values)


def by_torch_ipo(chosen: Answers, rejected: Answers):
    """DPOTrainer with loss_type ipo: scores over the mask's sum."""
    delta = chosen.gains / chosen.sizes - rejected.gains / rejected.sizes
    losses = (delta - 1 / (2 * BETA)) ** 2
    return losses, BETA * chosen.gains, BETA * rejected.gains


def by_torch_simpo(chosen: Answers, rejected: Answers):
    """CPOTrainer with loss_type simpo."""
    from torch.nn.functional import logsigmoid

    logits = chosen.means - rejected.means - GAMMA / BETA
    losses = -logsigmoid(BETA * logits) * (1 - SMOOTHING) - logsigmoid(-BETA * logits) * SMOOTHING
    return losses, BETA * chosen.means, BETA * rejected.means


def by_torch_orpo(chosen: Answers, rejected: Answers):
    """ORPOTrainer, of which every pair is a batch: its mean is over the tokens of a batch."""
    import torch
    from torch.nn.functional import logsigmoid

    def log1mexp(x):
        return torch.log1p(-torch.exp(x))

    a, b = chosen.means, rejected.means
    log_odds = (a - b) - (log1mexp(a) - log1mexp(b))
    nll = _stacked([-one.mean() for one in chosen.whole])
    return nll - BETA * logsigmoid(log_odds), BETA * a, BETA * b


def by_torch_kto(answers: Answers, others: Answers):
    """KTOTrainer with loss_type kto, of which all examples are a batch."""
    from torch import sigmoid

    kl = others.gains.mean().detach().clamp(min=0)
    losses = [
        UP * (1 - sigmoid(BETA * (gain - kl)))
        if label
        else DOWN * (1 - sigmoid(BETA * (kl - gain)))
        for gain, label in zip(answers.gains, LABELS, strict=True)
    ]
    return _stacked(losses), BETA * answers.gains, None


class Case(NamedTuple):
    objective: Any
    by_torch: Callable


CASES = {
    "ipo": Case(ipo.Objective(beta=BETA), by_torch_ipo),
    "simpo": Case(
        simpo.Objective(beta=BETA, gamma=GAMMA, label_smoothing=SMOOTHING), by_torch_simpo
    ),
    "orpo": Case(orpo.Objective(beta=BETA), by_torch_orpo),
    "kto": Case(
        kto.Objective(beta=BETA, desirable_weight=UP, undesirable_weight=DOWN), by_torch_kto
    ),
}
PAIRED = [name for name in CASES if name != "kto"]


def rows(name: str) -> dict[str, jax.Array]:
    """The rows of a test, where labels are the weights of targets as `unpaired` gives them."""
    found = batch()
    if name != "kto":
        return found
    pair = np.asarray(found["document"]) // 2 + 2 * np.arange(4)[:, None]  # 0 and 1, then 2
    label = np.array([*LABELS, *[True] * 99])[pair]
    weight = found["weight"] * jnp.where(label, 1.0, 2.0)
    return found | {"weight": weight, "reference": found["reference"] - FURTHER}


@eqx.filter_jit
def both(objective, model, batch, carry: Carry, step):
    """The metrics, the gradient of the mean loss, and the carry."""

    def loss(model):
        found, after = objective(
            model, batch, key=None, carry=carry, helpers={}, step=step, steps=9
        )
        return found.total / found.weight, (found.metrics(), after)

    gradient, (metrics, after) = eqx.filter_grad(loss, has_aux=True)(model)
    return metrics, gradient, after


def computed(name: str, model, batch):
    """Metrics and gradients; KTO has the divergence of the batch itself, as of the step before."""
    objective = CASES[name].objective
    start = objective.start(model, {})
    _, _, carry = both(objective, model, batch, start, jnp.int32(0))
    return both(objective, model, batch, carry, jnp.int32(1))[:2]


def in_torch(name: str, model) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    import torch

    def log_p(tokens: np.ndarray):
        ids = torch.from_numpy(tokens).long()[None]
        every = model(ids).logits.log_softmax(-1)[:, :-1]
        return every.gather(-1, ids[:, 1:, None])[0, :, 0]

    further = FURTHER if name == "kto" else 0.0
    held, judged, sides = pairs(), [torch.from_numpy(one - further) for one in references()], []
    for side in (0, 1):
        whole = [log_p(answers[side]) for _, answers in held]
        own = [one[prompt - 1 :] for one, (prompt, _) in zip(whole, held, strict=True)]
        sides.append(Answers(own, judged[side::2], whole))
    losses, first, second = CASES[name].by_torch(*sides)
    losses.mean().backward()
    found = {"loss": float(losses.detach().mean())}
    if second is not None:
        found |= {"rewards_chosen": float(first.detach().mean())}
        found |= {"rewards_rejected": float(second.detach().mean())}
        found |= {"accuracy": float((first > second).float().mean())}
    else:
        label = torch.tensor(LABELS)
        found |= {"rewards_chosen": float(first.detach()[label].mean())}
        found |= {"rewards_rejected": float(first.detach()[~label].mean())}
        found |= {"kl": float(sides[1].gains.detach().mean().clamp(min=0))}
        assert found["kl"] > 1
    return found, {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.skipif(not reference.HAS_TORCH, reason="it is what this is compared with")
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradients_are_those_of_trl(name):
    config, family = reference.config(CASE), importlib.import_module(f"windlass.models.{CASE}")
    model = tiny.filled(tiny.abstract(config), family.NAMES, reference.tensors(config))
    metrics, gradient = computed(name, model, rows(name))
    by_trl, gradients = in_torch(name, reference.module(CASE))
    for key, value in by_trl.items():
        assert float(metrics[key]) == pytest.approx(value, rel=1e-6, abs=1e-6), key
    apart = tiny.apart(to_tensors(gradient, family.NAMES), gradients)
    loss = abs(float(metrics["loss"]) / by_trl["loss"] - 1)
    print(f"{name}: the loss differs by {loss:.1e} of it, gradients by {apart:.1e}")
    assert apart < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_on_a_mesh_the_loss_and_gradients_are_those_of_one_device(name):
    model, held = tiny.model("gru"), rows(name)
    expected = computed(name, model, held)
    with tiny.on((2, 2, 2)) as mesh:
        found = computed(name, *tiny.placed(model, held, mesh))
    assert tiny.apart(found[0], expected[0]) < 1e-5
    assert tiny.apart(*(jax.tree.leaves(x[1]) for x in (found, expected))) < 1e-5


FIELDS = [(name, field) for name, case in CASES.items() for field in vars(case.objective)]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids="-".join)
def test_every_field_changes_the_loss(name, field):
    import dataclasses

    objective = CASES[name].objective
    value = not getattr(objective, field) if field == "prompt" else 0.2
    changed = dataclasses.replace(objective, **{field: value})
    model, held = tiny.model("gru"), rows(name)
    losses = [
        both(one, model, held, one.start(model, {}), jnp.int32(0))[0]["loss"]
        for one in (objective, changed)
    ]
    assert losses[0] != losses[1]


def test_the_divergence_of_a_step_is_the_sum_of_its_microbatches_and_never_below_0():
    objective, model, held = CASES["kto"].objective, tiny.model("gru"), rows("kto")
    start, parts = objective.start(model, {}), [slice(0, 2), slice(2, 4)]
    carry = start
    for part in parts:
        some = {name: column[part] for name, column in held.items()}
        metrics, _, carry = both(objective, model, some, carry, jnp.int32(0))
        assert metrics["kl"] == 0  # the weights are those of the start
    whole = both(objective, model, held, start, jnp.int32(0))[2]
    assert carry.sums.total == pytest.approx(float(whole.sums.total), rel=1e-5)
    assert carry.sums.count == whole.sums.count == 3
    after = both(objective, model, held, carry, jnp.int32(1))[0]
    assert after["kl"] == pytest.approx(max(0.0, float(whole.sums.total) / 3), rel=1e-5)
    below = carry.sums._replace(total=jnp.float32(-5))
    assert below.at(jnp.int32(1)).kl == 0


def test_an_answer_that_is_certain_has_a_finite_loss():
    from windlass.objectives.orpo import _log_odds

    value, slope = jax.value_and_grad(lambda x: _log_odds(x))(jnp.float32(0))
    assert np.isfinite(value) and np.isfinite(slope)


REFUSED = [
    (ipo.Objective, dict(beta=0.0), ["beta is 0.0; it is a factor, above 0"]),
    (orpo.Objective, dict(beta=-1.0), ["beta is -1.0; it is a factor, above 0"]),
    (
        simpo.Objective,
        dict(beta=0.0, gamma=-0.5, label_smoothing=0.5),
        [
            "beta is 0.0; it is a factor, above 0",
            "gamma is -0.5; it is a margin, 0 or more",
            "label_smoothing is 0.5; it is a share, 0 or more and below 0.5",
        ],
    ),
    (
        kto.Objective,
        dict(beta=0.0, desirable_weight=0.0, undesirable_weight=-1.0),
        [
            "beta is 0.0; it is a factor, above 0",
            "desirable_weight is 0.0; it is a factor, above 0",
            "undesirable_weight is -1.0; it is a factor, above 0",
        ],
    ),
]


@pytest.mark.parametrize(("kind", "fields", "wrong"), REFUSED, ids=["ipo", "orpo", "simpo", "kto"])
def test_what_cannot_be_is_refused_all_at_once(kind, fields, wrong):
    with pytest.raises(ValueError) as error:
        kind(**fields)
    assert list(error.value.args) == wrong
