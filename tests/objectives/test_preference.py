"""Direct preference optimisation, against the formula of TRL in torch, answer by answer."""

import dataclasses
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.models import reference
from windlass.hub.names import to_tensors
from windlass.objectives import Carry, Tally
from windlass.objectives.preference import Objective

CASE = "qwen2"
BETA, SMOOTHING = 0.3, 0.1
# Prompt, chosen and rejected answer of each pair, in tokens; the first two share a row.
SIZES = [(3, 2, 4), (2, 5, 3), (4, 6, 5)]
LENGTH = 24
KEY = {
    "rewards/chosen": "rewards_chosen",
    "rewards/rejected": "rewards_rejected",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "logps/chosen": "logps_chosen",
    "logps/rejected": "logps_rejected",
}


def pairs() -> list[tuple[int, list[np.ndarray]]]:
    """The size of each prompt, and both of its answers behind it."""
    vocab, found = reference.config(CASE).vocab, []
    for number, (prompt, *answers) in enumerate(SIZES):
        first = tiny.documents(vocab, [prompt], seed=number)[0]
        second = tiny.documents(vocab, answers, seed=10 + number)
        found.append((prompt, [np.concatenate([first, answer]) for answer in second]))
    return found


def references() -> list[np.ndarray]:
    """Of each token of each answer, as another model might have judged it."""
    rng = np.random.default_rng(3)
    return [-3 * rng.uniform(size=size).astype(np.float32) for _, *two in SIZES for size in two]


def batch() -> dict[str, jax.Array]:
    """Rows of two pairs, of one, and of none."""
    (_, a), (_, b), (_, c) = pairs()
    rows = tiny.packed([[*a, *b], [*c], [], []], LENGTH)
    weight, column = np.zeros((4, LENGTH), np.float32), np.zeros((4, LENGTH), np.float32)
    judged = iter(references())
    for row, held in ((0, pairs()[:2]), (1, pairs()[2:])):
        at = 0
        for prompt, answers in held:
            for answer in answers:
                answered = slice(at + prompt - 1, at + len(answer) - 1)
                weight[row, answered], column[row, answered] = 1, next(judged)
                at += len(answer) - 1
    return rows | {"weight": jnp.asarray(weight), "reference": jnp.asarray(column)}


def by_torch(model) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """TRL's sigmoid loss with its metrics, and the gradients of the mean over pairs."""
    import torch
    from torch.nn.functional import logsigmoid

    def log_probability(prompt: int, tokens: np.ndarray):
        ids = torch.from_numpy(tokens).long()[None]
        log_p = model(ids).logits.log_softmax(-1)[:, :-1]
        each = log_p.gather(-1, ids[:, 1:, None])[0, :, 0]
        return each[prompt - 1 :].sum()

    logps = [[log_probability(prompt, answer) for answer in two] for prompt, two in pairs()]
    chosen, rejected = (torch.stack(answers) for answers in zip(*logps, strict=True))
    sums = [float(each.sum()) for each in references()]
    ref_chosen, ref_rejected = torch.tensor(sums[::2]), torch.tensor(sums[1::2])

    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = -logsigmoid(BETA * logits) * (1 - SMOOTHING) - logsigmoid(-BETA * logits) * SMOOTHING
    losses.mean().backward()
    chosen_rewards = BETA * (chosen - ref_chosen).detach()
    rejected_rewards = BETA * (rejected - ref_rejected).detach()
    found = {
        "loss": losses,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    means = {KEY.get(name, name): float(value.detach().mean()) for name, value in found.items()}
    return means, {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}


@eqx.filter_jit
def tally(objective, model, batch) -> Tally:
    return objective(model, batch, key=None, carry=Carry(), helpers={}, step=jnp.int32(0), steps=1)[
        0
    ]


@eqx.filter_jit
def both(objective, model, batch):
    """The metrics, and the gradient of the mean loss."""

    def loss(model):
        found = tally(objective, model, batch)
        return found.total / found.weight, found.metrics()

    gradient, metrics = eqx.filter_grad(loss, has_aux=True)(model)
    return metrics, gradient


@pytest.mark.skipif(not reference.HAS_TORCH, reason="it is what this is compared with")
def test_loss_metrics_and_gradients_of_packed_pairs_are_those_of_trl_for_each_answer_alone():
    config, family = reference.config(CASE), importlib.import_module(f"windlass.models.{CASE}")
    model = tiny.filled(tiny.abstract(config), family.NAMES, reference.tensors(config))
    metrics, gradient = both(Objective(beta=BETA, label_smoothing=SMOOTHING), model, batch())
    by_trl, gradients = by_torch(reference.module(CASE))
    gap = tiny.apart(metrics, {name: np.float32(x) for name, x in by_trl.items()})
    apart = tiny.apart(to_tensors(gradient, family.NAMES), gradients)
    print(f"metrics differ by {gap:.1e}, gradients by {apart:.1e}")
    assert gap < 1e-5
    assert apart < 1e-5


@pytest.mark.long
def test_on_a_mesh_the_loss_and_gradients_are_those_of_one_device():
    model, rows = tiny.model("gru"), batch()
    expected = both(Objective(beta=BETA), model, rows)
    with tiny.on((2, 2, 2)) as mesh:
        found = both(Objective(beta=BETA), *tiny.placed(model, rows, mesh))
    assert tiny.apart(found[0], expected[0]) < 1e-5
    assert tiny.apart(*(jax.tree.leaves(x[1]) for x in (found, expected))) < 1e-5


def test_where_the_reference_is_the_model_itself_the_loss_is_log_2_and_no_reward_is_given():
    model, rows = tiny.model("gru"), batch()

    @eqx.filter_jit
    def log_p(model):
        return model.head.log_probabilities(model(rows)[0], rows["targets"])

    found = tally(Objective(), model, rows | {"reference": log_p(model)})
    assert found.weight == 3
    metrics = found.metrics()
    assert abs(metrics["loss"] - np.log(2)) < 1e-6
    assert metrics["margin"] == metrics["rewards_chosen"] == metrics["rewards_rejected"] == 0


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Objective)])
def test_every_field_changes_the_loss(field):
    changed = dataclasses.replace(Objective(), **{field: 0.2})
    model, rows = tiny.model("gru"), batch()
    assert tally(changed, model, rows).total != tally(Objective(), model, rows).total


def test_what_cannot_be_is_refused_all_at_once():
    with pytest.raises(ValueError) as error:
        Objective(beta=0.0, label_smoothing=0.5)
    assert error.value.args == (
        "beta is 0.0; it is a factor, above 0",
        "label_smoothing is 0.5; it is a share, 0 or more and below 0.5",
    )
