"""What better settings gain over a recipe's own, in words, line by line."""

from collections.abc import Iterator
from typing import Any

from windlass.config.sections import flat
from windlass.planning import figures, limits, reasons
from windlass.planning.plan import Plan
from windlass.planning.search import MARGIN, Best
from windlass.planning.winner import Found

TOLD = 3  # parts of a step whose difference is told
REMAT = {
    "none": "nothing is computed twice",
    "saved": "what is cheap is computed twice",
    "full": "all that the layers do is computed twice",
}


def gain(best: Best) -> Iterator[tuple[str, str]]:
    """What is gained, and what for."""
    plan, before = best.plan, best.before
    yield "best", _summary(best)
    if best.keys:
        yield "step", _step(before, plan)
    held, limit = figures.gib(plan.memory.total), figures.gib(plan.memory.limit)
    was = f"{figures.gib(before.memory.total)} → " if best.keys else ""
    yield "memory", f"{was}{held} of {limit} GiB a device, or up to {plan.memory.error:.0%} more"
    if (paid := _paid(plan)) is not None:
        was = _paid(before) if best.keys and before.fits != "no" else None
        yield "run", f"{was} → {paid}" if was else paid
    for key, value in flat(best.keys).items():
        if (why := _why(key, value, before.settings, plan.settings)) is not None:
            yield "why", why


def winning(found: Found) -> str:
    """Which target is best, and what it is."""
    assert found.winner is not None
    plan = found.winner.plan
    said = reasons.cells(plan)
    paid = _paid(plan)
    return f"{plan.target.name}: {said['tokens/s']} tokens/s{f', {paid}' if paid else ''}"


def _summary(best: Best) -> str:
    some = f"of {best.looked} settings looked at"
    if not best.keys:
        if best.plan.fits == "no":
            return f"none {some} fits; these come nearest, {_short(best.plan)}"
        return f"the recipe's own settings; none {some} is faster by {MARGIN:.0%}"
    if best.plan.fits != "yes":
        return f"none {some} is sure to fit; these come nearest{_lacks(best.plan)}"
    if best.before.fits != "yes":
        return (
            f"the fastest {some} that fits; the recipe's own are not sure to{_lacks(best.before)}"
        )
    return f"{best.faster:.2f} times as fast, {some}"


def _lacks(plan: Plan) -> str:
    return f", {_short(plan)}" if plan.fits == "no" else ""


def _short(plan: Plan) -> str:
    return f"{figures.gib(plan.lacks)} GiB too many"


def _step(before: Plan, plan: Plan) -> str:
    """The time of a step before and after, and the parts that make the difference."""
    assert before.time is not None and plan.time is not None
    old, new = before.time.parts, plan.time.parts
    changed = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {**old, **new}}
    most = sorted(changed, key=lambda name: -abs(changed[name]))[:TOLD]
    name, size = figures.unit(plan.time.seconds)
    parts = [
        f"{part} {figures.about(old.get(part, 0.0) / size)} → "
        f"{figures.about(new.get(part, 0.0) / size)}"
        for part in most
        if abs(changed[part]) > MARGIN / 2 * plan.time.seconds
    ]
    whole = f"{figures.about(before.time.seconds / size)} → "
    whole += f"{figures.about(plan.time.seconds / size, plan.time.error)} {name}"
    return f"{whole}: {', '.join(parts)}" if parts else whole


def _paid(plan: Plan) -> str | None:
    """What the run takes and costs, as far as that is known."""
    if plan.cost is None or (bill := plan.cost.run) is None:
        return None
    money = limits.spent(plan.cost, bill)
    hours = reasons.hours(bill.hours)
    return hours if money is None else f"{hours}, {figures.dollars(money[0])} {money[1]}"


def _why(key: str, value: Any, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    match key:
        case "train.remat":
            return f"{key} {value}: {REMAT[value]}"
        case "train.accumulation" | "train.batch_per_device":
            old, new = before["rows_per_device"], now["rows_per_device"]
            return f"{key} {value}: {new} rows a device at a time, not {old}"
        case "train.layers_per_loop":
            return f"{key} {value}: fewer and longer iterations, which take longer to compile"
        case "mesh.data" if value > 1 and now["mesh"]["fsdp"] == 1:
            return "mesh: each device has whole weights, and nothing to gather"
        case "mesh.fsdp" if value > before["mesh"]["fsdp"]:
            return f"mesh.fsdp {value}: weights are stored in pieces, which leaves more room"
        case "mesh.tensor" if value > before["mesh"]["tensor"]:
            return f"mesh.tensor {value}: matrices are computed in pieces, on more rows each"
    return None
