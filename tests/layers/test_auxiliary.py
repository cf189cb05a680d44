"""Auxiliary losses and metrics: out of the loop over layers, into the loss once, and no further."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.training.bench import Bench
from windlass.evaluation.loss import average, make_evaluation
from windlass.layers.auxiliary import AuxiliaryLosses, coefficients
from windlass.layers.context import Packed
from windlass.layers.kv_cache import KVCache
from windlass.layers.stack import arrange, stacked
from windlass.objectives import Carry, Tally, settled
from windlass.objectives.next_token import Objective
from windlass.program.step import Frozen

# Out of the loop


class Counting(eqx.Module):
    """A layer that reports the power of its output, under names of its own."""

    factor: jax.Array
    names: tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x, context):
        x = jnp.sin(self.factor * x)
        for name in self.names:
            context.auxiliary(name, jnp.sum(x**2), jnp.float32(x.size))
        return x


NAMES = [("power", "power", "of_{layer}"), ("power", "second")]
MAKERS = [lambda key, layer, names=n: Counting(1 + jax.random.uniform(key), names) for n in NAMES]
X = jnp.linspace(-1.0, 1.0, 12).reshape(1, 12, 1)
PLACES = {name: jnp.zeros((1, 12), jnp.int32) for name in ("position", "document")}


def by_hand(stack) -> dict:
    y, found = X, {}
    for layer in range(stack.layers):
        y = jnp.sin(stack.kinds[layer % 2].factor[layer // 2] * y)
        for name in NAMES[layer % 2]:
            name = name.replace("{layer}", str(layer))
            total, weight = found.get(name, (0.0, 0.0))
            found[name] = (total + jnp.sum(y**2), weight + 12)
    return found


@pytest.mark.parametrize(("remat", "unroll"), [("none", 1), ("saved", 1), ("full", 2), ("none", 3)])
@pytest.mark.parametrize("layers", [5, 6])
def test_a_stack_reports_the_sum_over_its_layers_or_each_by_its_number(layers, remat, unroll):
    stack = arrange(stacked(MAKERS, layers, key=jax.random.key(0)), remat=remat, unroll=unroll)

    def mixed(report):
        ratios = [total / weight for _, (total, weight) in sorted(report.items())]
        return sum((i + 1) * ratio for i, ratio in enumerate(ratios)), report

    whole = eqx.filter_value_and_grad(lambda s: mixed(s(X, Packed(PLACES))[2]), has_aux=True)(stack)
    plain = eqx.filter_value_and_grad(lambda s: mixed(by_hand(s)), has_aux=True)(stack)
    assert len(whole[0][1]) == 2 + (layers + 1) // 2
    assert tiny.apart(whole, plain) < 1e-5


def test_nothing_is_reported_in_generation():
    config, batch = tiny.config("router"), tiny.rows(96)
    model = tiny.abstract(config)
    call = lambda model, batch: model(batch, KVCache.empty(8, 16))[1]  # noqa: E731
    assert eqx.filter_eval_shape(call, model, batch) == {}
    assert list(eqx.filter_eval_shape(lambda model: model(batch)[1], model)) == [
        *("balance", "router_entropy"),
        *(f"router_entropy_{layer}" for layer in range(3)),
    ]


# Into the loss


class Declaring(AuxiliaryLosses):
    losses: dict[str, float]


def losing(**losses: float):
    """A model of nothing but declared losses."""
    return {"blocks": [Declaring(losses), Declaring(losses)]}


def tally(total: float, weight: float, auxiliary: dict[str, tuple[float, float]]) -> Tally:
    sums = {name: jax.tree.map(jnp.float32, pair) for name, pair in auxiliary.items()}
    return Tally(jnp.float32(total), jnp.float32(weight), {}, {}, sums)


def test_the_loss_is_the_weighted_mean_of_the_microbatches_with_their_auxiliary_means():
    rng = np.random.default_rng(0)
    total, weight, a, b = rng.uniform(1, 9, (4, 3))
    of_a, of_b = rng.uniform(1, 9, (2, 3))
    model = losing(a=0.3, b=2.0)
    parts = [
        settled(tally(each[0], each[1], {"a": each[2:4], "b": each[4:6], "seen": (1, 2)}), model)
        for each in zip(total, weight, a, of_a, b, of_b, strict=True)
    ]
    found = (parts[0] + parts[1] + parts[2]).metrics()
    expected = {
        "loss": np.sum(weight * (total / weight + 0.3 * a / of_a + 2 * b / of_b)) / weight.sum(),
        "objective_loss": total.sum() / weight.sum(),
        "a": a.sum() / of_a.sum(),
        "b": b.sum() / of_b.sum(),
        "seen": 0.5,
    }
    assert tiny.apart(found, expected) < 1e-6


def test_a_loss_is_added_once_and_one_without_a_weight_adds_nothing():
    model = losing(a=0.5)
    once = settled(tally(3, 2, {"a": (4, 2)}), model)
    assert float(once.total) == 3 + 2 * 0.5 * 2
    assert once.auxiliary == {}
    assert float(settled(tally(3, 2, {"a": (0, 0)}), model).total) == 3


def test_a_loss_that_an_objective_dropped_is_refused():
    with pytest.raises(ValueError) as refused:
        settled(tally(1, 1, {"other": (1, 1)}), losing(balance=0.5))
    assert str(refused.value) == (
        "the model declares the auxiliary loss balance, and the tally has none of that name; an "
        "objective gives a Tally all that `model(batch)` returned as auxiliary"
    )


def test_a_name_that_is_reported_or_declared_twice_is_refused():
    one = tally(1, 1, {"accuracy": (1, 1)})
    with pytest.raises(ValueError) as refused:
        settled(one._replace(sums={"accuracy": (one.total, one.weight)}), losing())
    assert str(refused.value) == "accuracy is reported by the model and by the objective"
    with pytest.raises(ValueError) as refused:
        coefficients([losing(a=0.5), losing(a=0.1)])
    assert str(refused.value) == "a is declared with 0.5 and with 0.1"


# In a step


def plainly_balanced(model, batch) -> dict[str, float]:
    """The balance loss and the entropy of the router, in numpy."""
    seen = []

    def watched(inner):
        def mixture(x, context):
            seen.append((inner.route.weight, x))
            return inner(x, context)

        return mixture

    x, totals = model.embedding(batch["tokens"]), np.zeros(2)
    tokens = np.asarray(batch["document"]) >= 0
    for layer in range(3):
        block = jax.tree.map(lambda w, i=layer: w[i], model.blocks.kinds[0])
        x = eqx.tree_at(lambda b: b.mixture, block, watched(block.mixture))(x, Packed(batch))
    for weight, inside in seen:
        z = np.asarray(inside, np.float64) @ np.asarray(weight, np.float64)
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        for row, real in zip(p, tokens, strict=True):
            first = np.bincount(row[real].argmax(-1), minlength=3) / real.sum()
            totals[0] += real.sum() * 3 * first @ row[real].mean(0)
            totals[1] += -(row[real] * np.log(row[real])).sum()
    balance, entropy = totals / (3 * tokens.sum())
    return {"balance": balance, "router_entropy": entropy}


@pytest.mark.long
def test_the_balance_loss_of_a_router_is_part_of_the_loss_in_training_and_in_evaluation():
    model, batch = tiny.model("router"), tiny.rows(96)
    evaluate = make_evaluation(lambda weights, _: weights, Objective(), steps=1)
    given = (Frozen(None, {}), batch, Carry(), jnp.int32(0))
    found = average([eqx.filter_jit(evaluate)(model, *given)])
    expected = plainly_balanced(model, batch)
    assert tiny.apart({name: found[name] for name in expected}, expected) < 1e-5
    assert found["objective_loss"] == pytest.approx(found["cross_entropy"], rel=1e-6)
    whole = found["cross_entropy"] + 0.5 * expected["balance"]
    assert found["loss"] == pytest.approx(whole, rel=1e-6)

    bench = Bench("router", (1, 1, 1), 1)
    trained = bench.go(bench.rows(0))
    whole = trained["cross_entropy"] + 0.5 * trained["balance"]
    assert trained["loss"] == pytest.approx(whole, rel=1e-6)


@pytest.mark.long
def test_the_gradient_is_that_of_the_objective_and_of_the_balance_loss_by_its_coefficient():
    config, batch = tiny.config("router"), tiny.rows(96)

    def gradient(loss, balance):
        model = tiny.made(dataclasses.replace(config, balance=balance))
        return jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(loss))(model))

    def balance(model):
        total, weight = model(batch)[1]["balance"]
        return total / weight

    parts = gradient(lambda model: tiny.whole_loss(model, batch), 0.0), gradient(balance, 0.0)
    expected = [of_tokens + 0.5 * balance for of_tokens, balance in zip(*parts, strict=True)]
    assert tiny.apart(gradient(lambda model: tiny.whole_loss(model, batch), 0.5), expected) < 1e-5
    assert tiny.apart(parts[0], expected) > 1e-3


@pytest.mark.long
def test_the_balance_loss_is_the_same_on_a_mesh():
    found, expected = (Bench("router", sizes, 2).curve(4) for sizes in ((2, 2, 2), (1, 1, 1)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
