"""Every recipe on every target, with every value of some keys."""

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
USUAL = ("v5e-1", "v5e-8", "v6e-1", "v6e-8", "a100", "h100")  # what many have a way to


def plans(
    recipes: Iterable[AnyRecipe],
    on: Sequence[Target],
    overrides: Sequence[str] = (),
    *,
    each: Sequence[str] = (),
    request: PlanRequest = PLAIN,
    console: Console | None = None,
) -> list[Plan | Refused]:
    """Every recipe on every target; where one cannot be laid out it is said why.

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
            # Files of one name in several folders are told apart by their folders.
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
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not found:
        raise UserError(f"--each is {key}; it must be a key and its values, as train.batch=8,16")
    return [f"{name}={value}" for value in found]


def best(found: Iterable[Plan | Refused]) -> list[Plan]:
    """Of plans that differ in their last key alone, on each target the fastest that fits.

    Of those that are as fast, but for what no estimate can tell, the one that takes least memory.
    """
    alike: dict[tuple, list[tuple[float, Plan]]] = {}
    for one in found:
        if isinstance(one, Plan) and one.fits == "yes" and one.tokens_per_second is not None:
            of = (one.recipe, one.keys[:-1], one.target.name)
            alike.setdefault(of, []).append((one.tokens_per_second, one))
    return [_fastest(plans) for plans in alike.values()]


def _fastest(plans: list[tuple[float, Plan]]) -> Plan:
    most = max(speed for speed, _ in plans)
    fast = [plan for speed, plan in plans if speed >= AS_FAST * most]
    return min(fast, key=lambda plan: plan.memory.total)


def misfits(found: Sequence[Plan | Refused]) -> list[str]:
    """Of each recipe that fits nowhere for certain, by how much it does not."""
    said = []
    for recipe in dict.fromkeys(one.recipe for one in found):
        plans = [one for one in found if isinstance(one, Plan) and one.recipe == recipe]
        if not plans or any(one.fits == "yes" for one in plans):
            continue
        nearest = min(plans, key=lambda one: one.memory.total / one.memory.limit)
        memory, keys = nearest.memory, "".join(f" {key}" for key in nearest.keys)
        where = f"the nearest is {nearest.target.name}{keys and f' with{keys}'}, where it takes"
        held, limit = gib(memory.total), f"{gib(memory.limit)} GiB per device"
        if nearest.fits == "tight":
            most = gib(memory.total * (1 + memory.error))
            said.append(f"{recipe} fits nowhere for certain: {where} {held} to {most} of {limit}")
        else:
            more = f"{gib(nearest.lacks)} too much"
            said.append(f"{recipe} fits nowhere: {where} {held} of {limit}, {more}")
    return said


def usual() -> list[Target]:
    """What to plan for where nothing is named: this machine, and what many have a way to."""
    return targets.several([targets.HERE, *USUAL])


def on_each(
    layers: Layers, on: Sequence[Target], make: Callable[[Layers, Target], T]
) -> list[T | Refused]:
    """What is made of a recipe on each target, or why not; what can be on none is refused."""
    found: list[T | Refused] = []
    for target in on:
        try:
            found.append(make(layers, target))
        except UserError as refused:
            found.append(Refused(layers.name, target, str(refused)))
    wrong = {one.target.name: one.why for one in found if isinstance(one, Refused)}
    if len(wrong) < len(found):
        return found
    first, *others = wrong.values()
    if all(other == first for other in others):
        raise UserError(first)
    raise UserError("\n".join(f"on {name}: {why}" for name, why in wrong.items()))
