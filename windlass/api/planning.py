"""Calls that plan a run, and the prices that they plan with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from windlass.config import AnyRecipe, Limits, Overrides, listing, read, words
from windlass.errors import UserError
from windlass.planning import calibration, limits, matrix, targets, winner
from windlass.planning import prices as costs
from windlass.planning.calibration import Fitted
from windlass.planning.cost import Assumed
from windlass.planning.plan import Plan, PlanRequest, Refused
from windlass.planning.prices import Prices
from windlass.planning.winner import Ranking, Wanted
from windlass.run_folder import runs as standings
from windlass.run_folder.runs import RUNS, find


def plan(
    recipe: AnyRecipe,
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    **how: Any,
) -> Plan | list[Plan | Refused]:
    """Plan of a recipe on devices that need not be here: memory, speed and cost.

    `on` are TPU slices such as v5e-8, GPUs such as h100 or 8xh200, `cpu`, or `here`; by
    default, this machine and a few common targets. `how` is as for `plans`. On one target
    it is a plan; on several a list, with a reason in place of a plan where the recipe cannot be
    laid out.
    """
    results = plans([recipe], on, overrides, **how)
    return results[0] if len(results) == 1 and isinstance(results[0], Plan) else results


def plans(
    recipes: Sequence[AnyRecipe],
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    *,
    each: Sequence[str] = (),
    rows: int | None = None,
    region: str | None = None,
    preemptions: float | None = None,
    compiles: bool = False,
    budget: int | float | None = None,
    within: str | None = None,
    console: Console | None = None,
    **keys: Any,
) -> list[Plan | Refused]:
    """Plans of every recipe on every target, and `each` value of keys: `["train.batch=8,16"]`.

    `rows` is the number of sequences per epoch, where the data is not here; `region` is that of the
    prices, or a provider; `preemptions` are those of a spot machine per hour. What costs more than
    `budget`, in USD, or takes longer than `within`, such as `6h`, is left out. With `compiles` the
    step is compiled for each target whose compiler is here.
    """
    most = _limits(budget, within)
    request = _plan_request(rows, region, preemptions, compiles)
    where = matrix.usual() if on is None else targets.several(on)
    how: dict[str, Any] = {"each": each, "request": request, "console": console}
    results = matrix.plans(recipes, where, words(overrides, keys), **how)
    return limits.enforce(results, most)


def best(
    recipe: AnyRecipe,
    on: str | Sequence[str] | None = None,
    overrides: Overrides = (),
    *,
    wanted: str = "cheapest",
    rows: int | None = None,
    region: str | None = None,
    preemptions: float | None = None,
    compiles: bool = False,
    budget: int | float | None = None,
    within: str | None = None,
    console: Console | None = None,
    tell: Callable[[str], None] = lambda text: None,
    **keys: Any,
) -> Ranking:
    """Search for the settings with which a recipe fits and is fastest, and the best target.

    Microbatch, rematerialisation, mesh and layers per loop are searched, and what a step computes
    stays the same; so do keys among `overrides`. `wanted` is `cheapest` or `fastest`; the rest is
    as for `plans`, and `tell` is called with the progress. Only the result is compiled.
    """
    if wanted not in get_args(Wanted):
        raise UserError(f"best is {wanted}; it must be {listing(get_args(Wanted))}")
    most = _limits(budget, within)
    request = _plan_request(rows, region, preemptions, compiles)
    where = matrix.usual() if on is None else targets.several(on)
    how: dict[str, Any] = {"wanted": wanted, "request": request, "console": console, "tell": tell}
    return winner.find(recipe, where, words(overrides, keys), within=most, **how)


def calibrate(*names: str | Path) -> list[Fitted]:
    """Fit time estimates to the times of finished runs: these, or all in `runs`."""
    return calibration.calibrate([find(name) for name in names] or standings.within(RUNS))


def prices(
    chips: Sequence[str] = (), *, update: str | Path | None = None, reset: bool = False
) -> Prices:
    """Prices of chips, all of them or some: data with a date, and nothing is fetched.

    `update` is a file whose prices are taken from now on; `reset` goes back to those of windlass.
    """
    if update is not None:
        catalogue = costs.update(update)
    else:
        catalogue = costs.reset() if reset else costs.load()
    return catalogue.of([targets.chip(name).slug for name in chips]) if chips else catalogue


def _plan_request(
    rows: int | None, region: str | None, preemptions: float | None, compiles: bool
) -> PlanRequest:
    if region is not None:  # a typo is reported before anything is planned
        costs.check_place(costs.load(), region)
    return PlanRequest(rows, region, Assumed(preemptions=preemptions), compiles)


def _limits(budget: int | float | None, within: str | None) -> Limits:
    return read(Limits, {"budget": budget, "within": within}, origin="the call")
