"""The gain of better settings over a recipe's own, line by line."""

from collections.abc import Iterator
from typing import Any

from windlass import units
from windlass.config.sections import flat
from windlass.planning import limits
from windlass.planning.plan import Plan
from windlass.planning.search import MARGIN, Best
from windlass.planning.winner import Ranking
from windlass.reports import reasons

LARGEST = 3  # parts of a step whose difference is shown
REMAT = {
    "none": "nothing is recomputed",
    "saved": "cheap activations are recomputed",
    "full": "all activations of the layers are recomputed",
}


def gain(best: Best) -> Iterator[tuple[str, str]]:
    """Memory, step time and cost, before and after."""
    plan, before = best.plan, best.before
    yield "best", _summary(best)
    if best.keys:
        yield "step", _step(before, plan)
    yield from reasons.compiled(plan)
    was = f"{units.gib(before.memory.total)} → " if best.keys else ""
    yield "memory", f"{was}{reasons.memory(plan)}"
    if (cost := _time_and_cost(plan)) is not None:
        was = _time_and_cost(before) if best.keys and before.fits != "no" else None
        yield "run", f"{was} → {cost}" if was else cost
    keys = flat(best.keys)
    if "train.accumulation" in keys:  # which says the same
        keys.pop("train.batch_per_device", None)
    for key, value in keys.items():
        if (why := _why(key, value, before.settings, plan.settings)) is not None:
            yield "why", f"{key} {value}: {why}"


def winning(ranking: Ranking) -> str:
    """Best target, with its throughput, time and cost."""
    assert ranking.winner is not None
    plan = ranking.winner.plan
    cells = reasons.cells(plan)
    cost = _time_and_cost(plan)
    text = f"{plan.target.name}: {cells['tokens/s']} tokens/s{f', {cost}' if cost else ''}"
    if reasons.reads_alike(one.plan for one in ranking.each if isinstance(one, Best)):
        return text
    way = plan.cost and limits.cheapest(plan.cost, plan.cost.million_tokens)
    each = f", {units.dollars(way.usd)} per 1M {way.how}" if way and way.usd is not None else ""
    return f"{text}, for {cells['run tokens']} tokens{each}"


def _summary(best: Best) -> str:
    some = f"of {units.counted(best.trials, 'setting')} tried"
    if best.plan.fits != "yes":
        these = "these" if best.keys else "the recipe's own"
        return f"none {some} is sure to fit; {these} come nearest{_lacks(best.plan)}"
    if not best.keys:
        return f"the recipe's own settings; none {some} is faster by {MARGIN:.0%}"
    if best.before.fits != "yes":
        own = "do not" if best.before.fits == "no" else "are not sure to"
        return f"the fastest {some} that fits; the recipe's own {own}{_lacks(best.before)}"
    return f"{best.faster:.2f} times as fast, {some}"


def _lacks(plan: Plan) -> str:
    return f", {units.gib(plan.lacks)} GiB too much" if plan.lacks else ""


def _step(before: Plan, plan: Plan) -> str:
    """The time of a step before and after, and the parts that make the difference."""
    assert before.time is not None and plan.time is not None
    old, new = before.time.parts, plan.time.parts
    changed = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in {**old, **new}}
    most = sorted(changed, key=lambda name: -abs(changed[name]))[:LARGEST]
    name, size = units.time_unit(plan.time.seconds)
    parts = [
        f"{part} {units.rounded(old.get(part, 0.0) / size)} → "
        f"{units.rounded(new.get(part, 0.0) / size)}"
        for part in most
        if abs(changed[part]) > MARGIN / 2 * plan.time.seconds
    ]
    whole = f"{units.rounded(before.time.seconds / size)} → "
    whole += f"{units.rounded(plan.time.seconds / size, plan.time.error)} {name}"
    return f"{whole}: {', '.join(parts)}" if parts else whole


def _time_and_cost(plan: Plan) -> str | None:
    """Time and cost of the run, as far as they are known."""
    if plan.cost is None or (bill := plan.cost.run) is None:
        return None
    way = limits.cheapest(plan.cost, bill)
    hours = reasons.hours(way.hours)
    return hours if way.usd is None else f"{hours}, {units.dollars(way.usd)} {way.how}"


def _why(key: str, value: Any, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    old, new = before["rows_per_device"], now["rows_per_device"]
    split, was = now["mesh"], before["mesh"]
    match key:
        case "train.remat":
            return REMAT[value]
        case "train.accumulation" | "train.batch_per_device" if new != old:
            return f"{units.counted(new, 'sequence')} per device and microbatch, not {old}"
        case "train.layers_per_loop" if value > before["layers_per_loop"]:
            return "fewer iterations of the scan over layers; compiling takes longer"
        case "mesh.data" if value > 1 and split["fsdp"] == split["tensor"] == 1:
            return "each device has whole weights, without all-gathers"
        case "mesh.fsdp" if value > was["fsdp"]:
            return "weights are sharded, which leaves more memory"
        case "mesh.tensor" if value > was["tensor"]:
            return "matmuls are sharded, over more sequences each"
    return None
