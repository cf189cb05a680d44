"""Evaluation loss on held-out rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import Array, Int, PyTree

from windlass.objectives import BaseObjective, Carry, Tally, settled


def make_evaluation(
    model: Callable[..., Any],
    objective: BaseObjective,
    *,
    steps: int,
    helpers: Callable[[dict[str, PyTree]], dict[str, Any]] = dict,
) -> Callable[..., Tally]:
    """The objective on one batch, to be compiled; `model` and `helpers` are those of a step.

    The carry and the step are those of the run, which has `steps` in all.
    """

    def evaluate(
        weights: PyTree, frozen: Any, batch: dict[str, Array], carry: Carry, step: Int[Array, ""]
    ) -> Tally:
        context: dict[str, Any] = dict(carry=carry, step=step, steps=steps)
        context |= dict(helpers=helpers(frozen.helpers))
        whole = model(weights, frozen.model)
        return settled(objective.evaluate(whole, batch, **context), whole)

    return evaluate


def average(tallies: Iterable[Tally]) -> dict[str, float]:
    """The averages over all batches, of sums that are added in double precision."""
    host = [jax.tree.map(float, tally) for tally in tallies]
    sums = {"loss": [(tally.total, tally.weight) for tally in host]}
    sums |= {name: [tally.sums[name] for tally in host] for name in host[0].sums}
    means = {}
    for name, parts in sums.items():
        weight = math.fsum(weight for _, weight in parts)
        means[name] = math.fsum(total for total, _ in parts) / weight if weight else 0.0
    extremes = {name: max(t.extremes[name] for t in host) for name in host[0].extremes}
    if "cross_entropy" not in means:  # what is not of tokens leaves no token perplexed
        return means | extremes
    return means | extremes | {"perplexity": math.exp(min(means["cross_entropy"], 700.0))}
