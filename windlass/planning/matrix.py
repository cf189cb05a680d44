"""Matrix of plans: every recipe on every target, with every value of some keys."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console

from windlass.config import AnyRecipe, Layers
from windlass.errors import UserError
from windlass.planning import prices, targets
from windlass.planning import traced as tracing
from windlass.planning.plan import PLAIN, Plan, PlanRequest, Refused, planned
from windlass.planning.targets import Target
from windlass.starting import origin
from windlass.units import gib

T = TypeVar("T")
AS_FAST = 0.99  # of the fastest, which is no difference
USUAL = ("v5e-1", "v5e-8", "v6e-1", "v6e-8", "a100", "h100")  # that many can get


def plans(
    recipes: Iterable[AnyRecipe],
    on: Sequence[Target],
    overrides: Sequence[str] = (),
    *,
    each: Sequence[str] = (),
    request: PlanRequest = PLAIN,
    console: Console | None = None,
) -> list[Plan | Refused]:
    """Plans of every recipe on every target; `Refused` where one cannot be laid out.

    `each` are keys with several values, such as `train.batch=8,16`: a recipe is planned for each of
    these, and for every combination where there are several keys. A recipe that can be laid out on
    none of the targets is refused.
    """
    variants = list(itertools.product(*[_values(key) for key in each]))
    known = prices.load()
    loaded = [
        (recipe, keys, origin.load(recipe, [*overrides, *keys]))
        for recipe in recipes
        for keys in variants
    ]
    names = Counter(layers.name for _, _, layers in loaded)
    request = request._replace(tries=len(loaded) == 1 and not each)  # a table has no room for it
    return [
        dataclasses.replace(
            one,
            keys=keys,
            # Files of one name in several folders are distinguished by their folders.
            recipe=str(recipe) if names[layers.name] > len(variants) else one.recipe,
        )
        for recipe, keys, layers in loaded
        for one in on_each(
            layers, on, lambda d, t: planned(tracing.laid_out(d, t), t, known, request, console)
        )
    ]


def _values(key: str) -> list[str]:
    """`train.batch=8,16` as an override for each value."""
    name, equals, values = key.partition("=")
    choices = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not choices:
        raise UserError(f"--each is {key}; it must be a key and its values, as train.batch=8,16")
    return [f"{name}={value}" for value in choices]


def best(every: Iterable[Plan | Refused]) -> list[Plan]:
    """Fastest plan that fits on each target, of those that differ in their last key alone.

    Of those that are as fast, within the error of any estimate, the one with the least memory.
    """
    alike: dict[tuple, list[tuple[float, Plan]]] = {}
    for one in every:
        if isinstance(one, Plan) and one.fits == "yes" and one.tokens_per_second is not None:
            of = (one.recipe, one.keys[:-1], one.target.name)
            alike.setdefault(of, []).append((one.tokens_per_second, one))
    return [_fastest(plans) for plans in alike.values()]


def _fastest(plans: list[tuple[float, Plan]]) -> Plan:
    most = max(speed for speed, _ in plans)
    fast = [plan for speed, plan in plans if speed >= AS_FAST * most]
    return min(fast, key=lambda plan: plan.memory.total)


def misfits(every: Sequence[Plan | Refused]) -> list[str]:
    """Messages for recipes that fit nowhere for certain: the nearest target, and what it lacks."""
    lines = []
    for recipe in dict.fromkeys(one.recipe for one in every):
        plans = [one for one in every if isinstance(one, Plan) and one.recipe == recipe]
        if not plans or any(one.fits == "yes" for one in plans):
            continue
        nearest = min(plans, key=lambda one: one.memory.total / one.memory.limit)
        memory, keys = nearest.memory, "".join(f" {key}" for key in nearest.keys)
        where = f"the nearest is {nearest.target.name}{keys and f' with{keys}'}, where it takes"
        used, limit = gib(memory.total), f"{gib(memory.limit)} GiB per device"
        if nearest.fits == "tight":
            most = gib(memory.total * (1 + memory.error))
            lines.append(f"{recipe} fits nowhere for certain: {where} {used} to {most} of {limit}")
        else:
            more = f"{gib(nearest.lacks)} too much"
            lines.append(f"{recipe} fits nowhere: {where} {used} of {limit}, {more}")
    return lines


def usual() -> list[Target]:
    """Default targets, where none is named: this machine, and those that many can get."""
    return targets.several([targets.HERE, *USUAL])


def on_each(
    layers: Layers, on: Sequence[Target], make: Callable[[Layers, Target], T]
) -> list[T | Refused]:
    """Result of `make` on each target, or its refusal; one that is refused on all is an error."""
    results: list[T | Refused] = []
    for target in on:
        try:
            results.append(make(layers, target))
        except UserError as refused:
            results.append(Refused(layers.name, target, str(refused)))
    wrong = {one.target.name: one.why for one in results if isinstance(one, Refused)}
    if len(wrong) < len(results):
        return results
    first, *others = wrong.values()
    if all(other == first for other in others):
        raise UserError(first)
    raise UserError("\n".join(f"on {name}: {why}" for name, why in wrong.items()))
