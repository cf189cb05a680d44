"""Ranking of targets for a run, each with its best settings."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from rich.console import Console

from windlass.config import AnyRecipe, Limits
from windlass.planning import limits, matrix, prices, search
from windlass.planning.plan import PLAIN, Plan, PlanRequest, Refused
from windlass.planning.search import Best
from windlass.planning.targets import Target
from windlass.starting import origin

Wanted = Literal["cheapest", "fastest"]


class Ranking(NamedTuple):
    """The best settings of a recipe on each target, and the best of these."""

    each: list[Best | Refused]
    winner: Best | None  # None: it fits nowhere
    by: Wanted
    note: str | None  # on how they were compared

    def as_dicts(self) -> list[dict[str, Any]]:
        """JSON form: the targets in the order of the request."""
        return [
            {**one.as_dict(), "is_winner": one is self.winner, "wanted": self.by}
            for one in self.each
        ]


def find(
    recipe: AnyRecipe,
    on: Sequence[Target],
    overrides: Sequence[str] = (),
    *,
    wanted: Wanted = "cheapest",
    request: PlanRequest = PLAIN,
    within: Limits | None = None,
    console: Console | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Ranking:
    """Rank targets for a recipe by cost or speed, of those that fit and keep to limits."""
    known, layers = prices.load(), origin.load(recipe, overrides)
    each = matrix.on_each(layers, on, lambda d, t: search.best(d, t, known, request, console, tell))
    plans = [one.plan if isinstance(one, Best) else one for one in each]
    each = [
        one if isinstance(plan, Plan) else plan
        for one, plan in zip(each, limits.enforce(plans, within or Limits()), strict=True)
    ]
    return chosen(each, wanted)


def chosen(each: list[Best | Refused], wanted: Wanted) -> Ranking:
    """The cheapest or fastest of these that fits for certain."""
    fitting = [one for one in each if isinstance(one, Best) and one.plan.fits == "yes"]
    by, note = _compared([one.plan for one in fitting], wanted)
    worth = cost if by == "cheapest" else slowness
    return Ranking(each, min(fitting, key=lambda one: worth(one.plan), default=None), by, note)


def cost(plan: Plan) -> float:
    """USD per token: batches may differ from target to target, and so what a run trains on."""
    if plan.cost is None:
        return float("inf")
    run, steps = plan.cost.run, plan.extent.steps
    way = limits.cheapest(plan.cost, run or plan.cost.million_tokens)
    tokens = plan.extent.tokens * steps if run and steps else 1e6
    return float("inf") if way.usd is None else way.usd / tokens


def slowness(plan: Plan) -> float:
    """Seconds per token."""
    return float("inf") if not plan.tokens_per_second else 1 / plan.tokens_per_second


def _compared(fitting: Sequence[Plan], wanted: Wanted) -> tuple[Wanted, str | None]:
    unknown = [one.target.name for one in fitting if cost(one) == float("inf")]
    if wanted == "fastest" or not unknown:
        return wanted, None
    if len(unknown) == len(fitting):
        return "fastest", "no price is known, so targets are ranked by speed"
    return wanted, f"no price of {', '.join(unknown)} is known"
