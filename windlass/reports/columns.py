"""Facts of a run, and a comparison of runs, for a terminal and a page alike."""

from collections.abc import Callable, Iterator
from typing import Any

from windlass.reports.comparison import RunComparison
from windlass.reports.run_summary import Account, RunCost
from windlass.units import count, counted, dollars, duration, number, seconds, size

UNKNOWN = "?"
Rows = list[tuple[str, list[str]]]


def facts(run: Account) -> Iterator[tuple[str, str]]:
    """Settings and results of a run, a fact in a line."""
    standing, start = run.standing, run.start
    yield "run", str(standing.folder)
    steps = UNKNOWN if standing.steps is None else standing.steps
    yield "state", f"{standing.state} at step {standing.step} of {steps}"
    if start:
        chose = start["chose"]
        yield "device", device(run)
        yield "mesh", " × ".join(f"{name} {size}" for name, size in chose["mesh"].items())
        yield "batch", batch(run)
    if (of := run.parameters) is not None:
        yield "parameters", f"{of['trainable']:,} trainable of {of['total']:,}"
    if standing.validation_loss is not None:
        best = run.best and f", at best {number(run.best[1])} at step {run.best[0]}"
        yield "validation", f"{number(standing.validation_loss)}{best or ''}"
    if run.perplexity is not None:
        yield "perplexity", f"{number(run.perplexity)}, at best"
    if standing.loss is not None:
        yield "loss", number(standing.loss)
    if run.speed["step_ms"]:
        yield "speed", ", ".join(_speeds(run))
    yield from _times(run)
    if run.cost is not None:
        yield "cost", ", ".join(_costs(run.cost))
    if run.sample is not None:
        yield "sample", f"at step {run.sample.step}: {' '.join(run.sample.text.split())}"


def _times(run: Account) -> Iterator[tuple[str, str]]:
    """Running time, goodput, restarts and the time that is left."""
    time = run.goodput
    if time.share is None:
        return
    starts = len(time.starts)
    text = f"{duration(time.running)}, {duration(time.trained)} of it in steps"
    if starts > 1:
        text += f"; {starts} starts with {duration(time.downtime)} between them"
    yield "time", text
    text = f"{time.share:.1%} of the running time trained"
    if time.downtime and time.share_with_downtime is not None:
        text += f", {time.share_with_downtime:.1%} with the time between starts"
    yield "goodput", text
    if run.left_seconds:
        yield "left", f"about {duration(run.left_seconds)} to step {run.standing.steps:,}"


def _costs(cost: RunCost) -> Iterator[str]:
    yield f"{cost.chip_hours:.3g} chip-hours"
    kinds = (
        ("on demand", cost.on_demand_usd, cost.on_demand_place),
        ("spot", cost.spot_usd, cost.spot_place),
    )
    for name, usd, place in kinds:
        known = usd is not None and f"{dollars(usd)} {name} ({place})"
        yield known or f"no price {name} is known"
    if cost.forecast_on_demand_usd is not None:
        yield f"about {dollars(cost.forecast_on_demand_usd)} on demand at the last step"
    yield f"by prices of {cost.prices_date}"


def predictions(run: Account) -> list[tuple[str, str, str, str]]:
    """Predicted and measured values, and the error of the prediction."""
    planned, measured = run.planned, run.measured
    memory, time = planned.get("memory") or {}, planned.get("time") or {}
    wrong = run.errors
    peak, step = memory.get("total_bytes"), time.get("step_seconds")
    quantities = [
        ("memory, by the compiler", size, peak, measured.get("compiler_bytes"), "compiler"),
        ("memory, by the device", size, peak, measured.get("device_peak_bytes"), "device"),
        ("step time", seconds, step, measured.get("step_seconds"), "time"),
    ]
    return [
        (name, _or(show, before), _or(show, after), _or("{:+.1%}".format, wrong.get(key)))
        for name, show, before, after, key in quantities
        if after
    ]


def rows(comparison: RunComparison) -> list[tuple[str, Rows]]:
    """A comparison of runs, in groups of lines; a value for each run."""
    runs = comparison.runs

    def each(name: str, value: Callable[[Account], Any], show: Callable[[Any], str]):
        values = [value(run) for run in runs]
        return [] if all(x is None for x in values) else [(name, [_or(show, x) for x in values])]

    speed: Rows = [
        *each("tokens/s", lambda run: run.speed["tokens_per_second"], count),
        *each("step time", lambda run: run.speed["step_ms"], lambda x: seconds(x / 1000)),
        *each("MFU", lambda run: run.speed["mfu"], "{:.1%}".format),
        *each("training", lambda run: run.goodput.trained or None, duration),
        *each("running time", lambda run: run.goodput.running or None, duration),
        *each("goodput", lambda run: run.goodput.share, "{:.1%}".format),
    ]
    memory: Rows = [
        *each("by the compiler", lambda run: run.measured.get("compiler_bytes"), size),
        *each("by the device", lambda run: run.measured.get("device_peak_bytes"), size),
    ]
    losses: Rows = [
        (f"at step {step}", [_or(number, x) for x in values])
        for step, values in comparison.losses().items()
    ]
    losses += each("validation, last", lambda run: run.standing.validation_loss, number)
    losses += each("validation, best", lambda run: run.best and run.best[1], number)
    losses += each("perplexity, best", lambda run: run.perplexity, number)
    plan: Rows = [
        *each("memory off by", lambda run: run.errors.get("memory"), "{:+.1%}".format),
        *each("time off by", lambda run: run.errors.get("time"), "{:+.1%}".format),
    ]
    about: Rows = [
        *each("recipe", lambda run: run.standing.recipe, str),
        *each("state", lambda run: f"{run.standing.state}, step {run.standing.step}", str),
        *each("device", lambda run: device(run) if run.start else None, str),
        *each("trainable parameters", _trainable, "{:,}".format),
    ]
    settings: Rows = [
        (key, ["absent" if x is None else str(x) for x in values])
        for key, values in comparison.settings.items()
    ]
    cost: Rows = [
        *each("chip-hours", lambda run: run.cost and run.cost.chip_hours, "{:.3g}".format),
        *each("on demand", lambda run: run.cost and run.cost.on_demand_usd, dollars),
        *each("spot", lambda run: run.cost and run.cost.spot_usd, dollars),
        *each("per million tokens", lambda run: run.cost and run.cost.million_tokens_usd, dollars),
    ]
    groups = {
        "run": about,
        "speed": speed,
        "memory": memory,
        "cost": cost,
        "loss": losses,
        "plan": plan,
    }
    groups |= {"settings": settings}
    return [(title, group) for title, group in groups.items() if group]


def _trainable(run: Account) -> int | None:
    return None if run.parameters is None else run.parameters["trainable"]


def device(run: Account) -> str:
    of = run.start["chose"]["device"]
    return f"{of['count']} × {of['kind']}"


def batch(run: Account) -> str:
    of = run.start["chose"]["batch"]
    total = of["per_device"] * of["accumulation"] * of["shards"]
    return (
        f"{total} = {of['per_device']} per device × {of['accumulation']} accumulation × "
        f"{counted(of['shards'], 'shard')}"
    )


def _speeds(run: Account) -> Iterator[str]:
    speed, step = run.speed, run.speed["step_ms"]
    if speed["tokens_per_second"]:
        yield f"{count(speed['tokens_per_second'])} tokens/s"
    if step:
        yield f"{seconds(step / 1000)} per step"
    if speed["mfu"]:
        yield f"{speed['mfu']:.1%} MFU"
    if step and speed["data_wait_ms"]:
        yield f"{speed['data_wait_ms'] / step:.0%} of it waiting for data"


def _or(show: Callable[[Any], str], value: Any) -> str:
    return UNKNOWN if value is None else show(value)
