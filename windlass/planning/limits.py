"""Limits of the cost and duration of a run, and the plans that keep to them."""

from collections.abc import Sequence
from typing import NamedTuple

from windlass import units
from windlass.config import Limits, listing
from windlass.errors import UserError
from windlass.planning.cost import Bill, Cost, Interval
from windlass.planning.plan import Plan, Refused


class _Excess(NamedTuple):
    """Excess of a plan over the limits: the reason, and by what factor."""

    why: str
    times: float


def enforce(plans: Sequence[Plan | Refused], limits: Limits) -> list[Plan | Refused]:
    """Plans, with a refusal in place of each that is not known to keep to the limits.

    Where nothing is left, the nearest is named.
    """
    if limits == Limits():
        return list(plans)
    excess = {i: _excess(one, limits) for i, one in enumerate(plans) if isinstance(one, Plan)}
    left = [i for i, why in excess.items() if why is None]
    if excess and not left:
        raise UserError(_none_left(plans, excess, limits))
    return [
        Refused(one.recipe, one.target, f"left out: {over.why}", one.keys, one.fits)
        if (over := excess.get(i)) is not None
        else one
        for i, one in enumerate(plans)
    ]


class Way(NamedTuple):
    """A way to rent the machines of a run."""

    usd: float | None  # None: no price is known
    hours: Interval
    how: str


def cheapest(cost: Cost, bill: Bill) -> Way:
    """The cheapest way to rent what a bill is of."""
    return min(_ways(cost, bill), key=lambda way: way.usd or 0.0)


def _ways(cost: Cost, bill: Bill) -> list[Way]:
    """On demand; and spot, where the rate of preemptions is given or no other price is known."""
    ways = []
    if bill.on_demand is not None:
        ways.append(Way(bill.on_demand.expected, bill.hours, "on demand"))
    counts = cost.inputs["preemptions_per_hour"] is not None or not ways
    if counts and bill.spot is not None and bill.spot_hours is not None:
        ways.append(Way(bill.spot.expected, bill.spot_hours, "spot"))
    return ways or [Way(None, bill.hours, "on demand")]


def _excess(plan: Plan, limits: Limits) -> _Excess | None:
    if plan.fits == "no":
        times = plan.memory.total / plan.memory.limit
        return _Excess(f"it needs {units.gib(plan.lacks)} GiB more than a device has", times)
    if plan.cost is None or (bill := plan.cost.run) is None:
        return _Excess("its duration is not known; --rows N may give it", float("inf"))
    if limits.budget is not None and cheapest(plan.cost, bill).usd is None:
        return _Excess(f"no price of a {plan.target.chip.name} is known", float("inf"))
    each = [_excess_of(way, limits) for way in _ways(plan.cost, bill)]
    excess = [one for one in each if one is not None]
    return min(excess, key=lambda one: one.times) if len(excess) == len(each) else None


def _excess_of(way: Way, limits: Limits) -> _Excess | None:
    why, times, hours = [], 0.0, way.hours.expected
    if limits.budget is not None and way.usd is not None and way.usd > limits.budget:
        over = units.dollars(way.usd - limits.budget)
        why.append(f"{units.dollars(way.usd)} {way.how}, {over} above --budget")
        times = way.usd / limits.budget
    within = limits.within and limits.within.hours
    if within is not None and hours > within:
        over = units.seconds(3600 * (hours - within))
        why.append(f"{units.seconds(3600 * hours)}, {over} longer than --within")
        times = max(times, hours / within)
    return _Excess(listing(why, "and"), times) if why else None


def _none_left(
    plans: Sequence[Plan | Refused], excess: dict[int, _Excess | None], limits: Limits
) -> str:
    ordered = sorted((over.times, i, over.why) for i, over in excess.items() if over is not None)
    _, nearest, why = ordered[0]
    plan = plans[nearest]
    where = f"nothing keeps to {limits}"
    if len(ordered) == 1:
        return f"{where}: {plan.name} on {plan.target.name}: {why}"
    return f"{where}; the nearest is {plan.name} on {plan.target.name}: {why}"
