"""The reasons of a plan, in lines of a name and a text: layout, memory, step time, cost."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from windlass import units
from windlass.devices.mesh import row_groups
from windlass.planning.cost import Bill, Interval
from windlass.planning.exhausted import slower
from windlass.planning.plan import Plan, Refused
from windlass.planning.prices import Price
from windlass.planning.targets import Target
from windlass.units import duration

UNKNOWN = "?"
TOKENS = ("run tokens", "per 1M on demand", "per 1M spot")  # where runs read different amounts
NOTHING = 1e-3  # of the time between two saves
ALIKE = 1.01  # times the tokens of another run, which is no difference
HARDLY = 0.05  # restarts that are expected, below which they are not worth mentioning


def cells(plan: Plan) -> dict[str, str]:
    """The figures of a plan, by the columns of a table."""
    memory, time, tokens = plan.memory, plan.time, plan.tokens_per_second
    error = None if time is None else time.error
    run, epoch = (None, None) if plan.cost is None else (plan.cost.run, plan.cost.epoch)
    million = plan.cost and plan.cost.million_tokens
    used = units.gib(memory.total)
    if memory.error:  # a compiler's own figure has none
        used += f"–{units.gib(memory.total * (1 + memory.error))}"
    texts = {
        "GiB per device": f"{used} of {units.gib(memory.limit)}",
        "batch": str(plan.settings["batch"]),
        "step": time and units.seconds(time.seconds, error),
        "it/s": time and units.rounded(1 / time.seconds),
        "tokens/s": tokens and units.count(tokens, error),
        "MFU": plan.mfu and units.percent(plan.mfu, error),
        "run": run and hours(run.hours),
        "on demand": run and dollars(run.on_demand),
        "spot": run and dollars(run.spot),
        "run tokens": plan.extent.whole and units.count(plan.extent.whole),
        "per 1M on demand": million and _fine(million.on_demand),
        "per 1M spot": million and _fine(million.spot),
        "epoch on demand": epoch and dollars(epoch.on_demand),
        "epoch spot": epoch and dollars(epoch.spot),
    }
    return {name: text or UNKNOWN for name, text in texts.items()}


def reads_alike(plans: Iterable[Plan | Refused]) -> bool:
    """Return True if runs read as many tokens each, so that their time and cost compare."""
    whole = [one.extent.whole or 0 for one in plans if isinstance(one, Plan)]
    return not whole or max(whole) <= ALIKE * min(whole)


def length(plans: Sequence[Plan]) -> str:
    """Tokens of a step and of the run, from the least to the most of several plans."""
    first = plans[0].settings
    rows = sorted({one.settings["batch"] for one in plans})
    batch = units.counted(rows[-1], "sequence")
    batch = batch if len(rows) == 1 else f"{rows[0]:,} to {batch}"
    text = f"{batch} of {first['row_tokens']:,} tokens per step"
    steps = sorted({one.extent.steps for one in plans if one.extent.steps})
    whole = sorted({one.extent.whole for one in plans if one.extent.whole})
    if steps and whole:
        text += f", {_range(steps, '{:,}'.format)} steps, {_range(whole, units.count)} tokens"
    return text


def _range(values: Sequence[int], form: Callable[[int], str]) -> str:
    ends = dict.fromkeys((form(values[0]), form(values[-1])))
    return " to ".join(ends)


def heading(target: Target) -> str:
    """The chips and hosts of a target."""
    hosts = f" on {target.hosts} hosts" if target.hosts > 1 else ""
    # Of some TPUs JAX shows each core as a device, and a chip is what is paid for.
    cores = f", {target.devices} devices" if target.devices != target.chips else ""
    return f"{target.chips} × {target.chip.name}{cores}{hosts}"


def compiled(plan: Plan) -> Iterator[tuple[str, str]]:
    """The figures of the target's compiler."""
    if plan.compiled is None:
        return
    report = plan.compiled.report
    estimate = f"estimated {units.gib(plan.compiled.estimated)}, {plan.compiled.error:+.1%}"
    text = f"{units.gib(report.peak_bytes)} GiB per device ({estimate})"
    if report.flops is not None and report.moved_bytes is not None:
        text += f"; {report.flops:.3g} FLOPs and {report.moved_bytes:.3g} bytes moved per device"
    if report.cycles is not None:
        text += f", {report.cycles:.3g} cycles estimated"
    yield "compiled", f"{text}; {report.compiler}, in {duration(report.seconds)}"


def layout(plan: Plan) -> Iterator[tuple[str, str]]:
    """Batch, precision and mesh of a run, from the recipe or chosen."""
    settings = plan.settings
    kernel = f", {settings['attention']} attention" if settings["attention"] else ""
    groups = row_groups(settings["mesh"])
    yield (
        "batch",
        f"{units.counted(settings['batch'], 'sequence')} of {settings['row_tokens']:,} tokens: "
        f"{settings['rows_per_device']} per device × {settings['accumulation']} accumulation × "
        f"{units.counted(groups, 'shard')}; {settings['compute']}{kernel}, "
        f"remat {settings['remat']}",
    )
    split = " × ".join(f"{name} {size}" for name, size in settings["mesh"].items())
    yield "mesh", f"{split}{f' ({plan.mesh_reason})' if plan.mesh_reason else ''}"


def memory(plan: Plan) -> str:
    """Peak memory per device."""
    estimate = plan.memory
    text = f"{units.gib(estimate.total)} of {units.gib(estimate.limit)} GiB per device"
    text += f", or up to {estimate.error:.0%} more" if estimate.error else ""
    return text if plan.fits != "no" else f"{text}: {units.gib(plan.lacks)} GiB too much"


def step(plan: Plan) -> str | None:
    """Step time, and what bounds it."""
    if plan.time is None:
        return None
    whole = units.seconds(plan.time.seconds, plan.time.error)
    return f"{whole}, {plan.time.bound}-bound"


def changes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Changes that would make it fit, and their effect on the step time."""
    if plan.tried is None:
        return
    for one in plan.tried.changes:
        text = f"{one.keys}: {units.gib(one.memory.total)} of {units.gib(one.memory.limit)} GiB"
        if one.time is not None and plan.time is not None:
            text += f", {slower(one.time.seconds / plan.time.seconds)}"
        yield "to fit", f"{text}; {one.remark}" if one.remark else text
    if (least := plan.tried.least) is not None:
        used = f"{units.gib(least.memory.total)} of {units.gib(least.memory.limit)} GiB"
        yield "to fit", f"nothing that was tried would fit; the nearest is {least.keys}: {used}"


def money(plan: Plan) -> Iterator[tuple[str, str]]:
    """Cost of a run and of an epoch, and the prices behind it."""
    if plan.cost is None:
        return
    bills = {"run": plan.cost.run, "epoch": plan.cost.epoch}
    if plan.cost.run is None:
        bills["1M tokens"] = plan.cost.million_tokens
    for name, bill in bills.items():
        if bill is not None:
            yield name, f"{hours(bill.hours)}; {dollars(bill.on_demand)} on demand; {_spot(bill)}"
    prices = {"on demand": plan.cost.on_demand, "spot": plan.cost.spot}
    known = [f"{_price(price, kind)} {kind}" for kind, price in prices.items() if price is not None]
    if known:
        yield "prices", f"{', '.join(known)}, per chip-hour"
    yield "assumes", _assumed(plan.cost.inputs)


def _assumed(inputs: dict[str, Any]) -> str:
    """Assumptions behind a bill, beside the step time and the prices."""
    start = f"{duration(inputs['boot_seconds'])} to start a machine"
    start += f", {duration(inputs['compile_seconds'])} to compile"
    rate, between = inputs["preemptions_per_hour"], inputs["seconds_between_saves"]
    # Where saves take next to nothing, only what a preemption loses depends on them.
    if between is not None and (rate is not None or inputs["save_seconds"] > NOTHING * between):
        start += f", a save of {units.seconds(inputs['save_seconds'])} every "
        start += duration(between)
    return start if rate is None else f"{start}, {rate:g} preemptions per hour of spot machines"


def hours(span: Interval | None) -> str:
    """A time that a run may take."""
    return (
        UNKNOWN
        if span is None
        else units.seconds(3600 * span.expected, units.relative_error(*span))
    )


def dollars(span: Interval | None) -> str:
    """Money that a run may cost."""
    return UNKNOWN if span is None else units.dollars(span.expected, units.relative_error(*span))


def _fine(span: Interval | None) -> str:
    """Money of which there may be less than a cent."""
    if span is None or span.expected >= 1:
        return dollars(span)
    return f"${units.rounded(span.expected, units.relative_error(*span))}"


def _spot(bill: Bill) -> str:
    text = f"{dollars(bill.spot)} spot"
    if not bill.lost_hours or not bill.restarts or bill.restarts < HARDLY:
        return text
    lost = units.seconds(3600 * bill.lost_hours)
    return f"{text}, with {bill.restarts:.1f} restarts that take {lost}"


def _price(price: Price, kind: str) -> str:
    each = price.on_demand if kind == "on demand" else price.spot
    return f"${each:.3f} ({price.place}, {price.date})"
