"""What a run may cost and how long it may take, and the plans that keep to it."""

from collections.abc import Sequence
from typing import NamedTuple

from windlass import units
from windlass.config import Limits, listing
from windlass.errors import UserError
from windlass.planning.cost import Bill, Cost, Interval
from windlass.planning.plan import Plan, Refused


class _Missed(NamedTuple):
    """Why a plan does not keep to the limits, and how many times too much it is."""

    why: str
    times: float


def kept(found: Sequence[Plan | Refused], limits: Limits) -> list[Plan | Refused]:
    """Plans, with what takes too much, or is not known to take less, in words in their place.

    Where nothing is left, the nearest is named.
    """
    if limits == Limits():
        return list(found)
    missed = {i: _missed(one, limits) for i, one in enumerate(found) if isinstance(one, Plan)}
    left = [i for i, why in missed.items() if why is None]
    if missed and not left:
        raise UserError(_none_left(found, missed, limits))
    return [
        Refused(one.recipe, one.target, f"left out: {miss.why}", one.keys, one.fits)
        if (miss := missed.get(i)) is not None
        else one
        for i, one in enumerate(found)
    ]


class Way(NamedTuple):
    """How the machines of a run can be rented."""

    usd: float | None  # None: no price is known
    hours: Interval
    how: str


def cheapest(cost: Cost, bill: Bill) -> Way:
    """The cheapest way to rent what a bill is of."""
    return min(_ways(cost, bill), key=lambda way: way.usd or 0.0)


def _ways(cost: Cost, bill: Bill) -> list[Way]:
    """On demand; and spot, where somebody says how often such machines are taken away, or where
    no other price is known."""
    ways = []
    if bill.on_demand is not None:
        ways.append(Way(bill.on_demand.expected, bill.hours, "on demand"))
    counts = cost.inputs["preemptions_per_hour"] is not None or not ways
    if counts and bill.spot is not None and bill.spot_hours is not None:
        ways.append(Way(bill.spot.expected, bill.spot_hours, "spot"))
    return ways or [Way(None, bill.hours, "on demand")]


def _missed(plan: Plan, limits: Limits) -> _Missed | None:
    if plan.fits == "no":
        times = plan.memory.total / plan.memory.limit
        return _Missed(f"it needs {units.gib(plan.lacks)} GiB more than a device has", times)
    if plan.cost is None or (bill := plan.cost.run) is None:
        return _Missed("how long it takes is not known; --rows N may say it", float("inf"))
    if limits.budget is not None and cheapest(plan.cost, bill).usd is None:
        return _Missed(f"what a {plan.target.chip.name} costs is not known", float("inf"))
    each = [_missed_so(way, limits) for way in _ways(plan.cost, bill)]
    missed = [one for one in each if one is not None]
    return min(missed, key=lambda one: one.times) if len(missed) == len(each) else None


def _missed_so(way: Way, limits: Limits) -> _Missed | None:
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
    return _Missed(listing(why, "and"), times) if why else None


def _none_left(
    found: Sequence[Plan | Refused], missed: dict[int, _Missed | None], limits: Limits
) -> str:
    ordered = sorted((miss.times, i, miss.why) for i, miss in missed.items() if miss is not None)
    _, nearest, why = ordered[0]
    plan = found[nearest]
    where = f"nothing keeps to {limits}"
    if len(ordered) == 1:
        return f"{where}: {plan.name} on {plan.target.name}: {why}"
    return f"{where}; the nearest is {plan.name} on {plan.target.name}: {why}"
