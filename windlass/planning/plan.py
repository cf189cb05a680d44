"""Plan of a run on devices that need not be here: memory, step time and cost."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rich.console import Console

from windlass import markup, units
from windlass.config import Layers
from windlass.config.recipe import overlay
from windlass.devices import alignment, precision
from windlass.planning import changes, compiler
from windlass.planning import cost as costs
from windlass.planning import memory as memories
from windlass.planning import time as times
from windlass.planning import traced as tracing
from windlass.planning.changes import Change, Tried
from windlass.planning.compiler import CompilerReport
from windlass.planning.cost import Assumed, Cost
from windlass.planning.extent import Extent, extent
from windlass.planning.memory import Memory
from windlass.planning.prices import Prices
from windlass.planning.targets import Target
from windlass.planning.time import Time
from windlass.planning.trials import divided
from windlass.processes.garbage import uncollected
from windlass.program.described import Described
from windlass.run import checks

Fits = Literal["yes", "tight", "no"]


@dataclass(frozen=True)
class CompilerCheck:
    """The report of the target's compiler, and the error of the estimate beside it."""

    report: CompilerReport
    estimated: float  # bytes, before the compiler ran

    @property
    def error(self) -> float:
        """Relative error of the estimate."""
        return self.estimated / self.report.peak_bytes - 1

    def as_dict(self) -> dict[str, Any]:
        estimate = {"estimated_bytes": round(self.estimated), "estimate_error": self.error}
        return asdict(self.report) | estimate


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe on a target, before a device is rented."""

    recipe: str
    target: Target
    settings: dict[str, Any]  # what the recipe says, and what was chosen where it says nothing
    extent: Extent
    memory: Memory
    time: Time | None  # None: no speed estimate for such devices
    cost: Cost | None = None  # None where the time is
    mesh_reason: str | None = None
    notes: list[str] = field(default_factory=list)
    keys: tuple[str, ...] = ()  # of those that several plans differ in
    tried: Tried | None = None  # what would make it fit, where it does not for certain
    compiled: CompilerCheck | None = None  # where the target's own compiler ran

    @property
    def name(self) -> str:
        return " ".join([self.recipe, *self.keys])

    @property
    def fits(self) -> Fits:
        """`tight`: it fits if the estimate is right, and not if it is as wrong as it may be."""
        if self.compiled is not None:
            is_room = self.memory.total <= self.memory.limit
            return "yes" if self.compiled.report.fits and is_room else "no"
        if self.memory.fits:
            return "yes"
        return "tight" if self.memory.total <= self.memory.limit else "no"

    @property
    def lacks(self) -> int | float:
        """Bytes per device above the limit, if the estimate is right."""
        return max(0, self.memory.total - self.memory.limit)

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of full sequences, on all devices together."""
        return self.time and self.extent.tokens / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None where the peak is not known."""
        peak = self.target.chip.peak.get(self.settings["compute"])
        if peak is None or self.time is None:
            return None
        return self.time.flops / (self.time.seconds * self.target.devices * peak)

    def _repr_html_(self) -> str:
        """Table of its figures, for a notebook."""
        return markup.facts(self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        memory, time = self.memory, self.time
        yield "plan", f"{self.name} on {self.target.name}"
        yield "fits", self.fits
        yield "memory", f"{units.size(memory.total)} of {units.size(memory.limit)} per device"
        if time is not None:
            yield "step", units.seconds(time.seconds, time.error)
        if time is not None and self.tokens_per_second is not None:
            yield "tokens/s", units.count(self.tokens_per_second, time.error)
        if self.cost is not None and (bill := self.cost.run) is not None:
            off = units.relative_error(*bill.hours)
            yield "run", units.seconds(3600 * bill.hours.expected, off)
            for name, money in (("on demand", bill.on_demand), ("spot", bill.spot)):
                if money is not None:
                    yield name, units.dollars(money.expected, units.relative_error(*money))

    def as_dict(self) -> dict[str, Any]:
        """JSON form; units are in the names."""
        target, memory, time = self.target, self.memory, self.time
        return {
            "recipe": self.recipe,
            "keys": list(self.keys),
            "target": {
                "name": target.name,
                "chip": target.chip.name,
                "devices": target.devices,
                "chips": target.chips,
                "hosts": target.hosts,
            },
            "settings": self.settings,
            "mesh_reason": self.mesh_reason,
            "fits": self.fits,
            "memory": {
                "total_bytes": round(memory.total),
                "limit_bytes": memory.limit,
                "error_share": memory.error,
                "parts_bytes": {name: round(size) for name, size in memory.parts.items()},
            },
            "compiled": self.compiled and self.compiled.as_dict(),
            "time": time
            and {
                "step_seconds": time.seconds,
                "error_share": time.error,
                "parts_seconds": time.parts,
                "bound": time.bound,
                "model_flops": time.flops,
                "steps_per_second": 1 / time.seconds,
                "tokens_per_second": self.tokens_per_second,
                "mfu": self.mfu,
                "efficiency": time.source,
                "loops": time.loops and time.loops._asdict(),
                "factors": time.fitted and time.fitted.factors,
            },
            "length": {
                "tokens_per_step": self.extent.tokens,
                "steps": self.extent.steps,
                "steps_per_epoch": self.extent.epoch_steps,
            },
            "cost": self.cost and self.cost.as_dict(),
            "changes": [_plain(one) for one in self.tried.changes] if self.tried else [],
            "notes": self.notes,
        }


@dataclass(frozen=True)
class Refused:
    """A recipe that cannot be laid out on a target, or takes too much there, and why."""

    recipe: str
    target: Target
    why: str
    keys: tuple[str, ...] = ()
    fits: Fits = "no"  # in memory: a run may fit and be too slow or too dear

    @property
    def name(self) -> str:
        return " ".join([self.recipe, *self.keys])

    def as_dict(self) -> dict[str, Any]:
        named = {"recipe": self.recipe, "keys": list(self.keys)}
        return {**named, "target": {"name": self.target.name}, "refused": self.why}


class PlanRequest(NamedTuple):
    """The options of a plan beside its recipe and target."""

    rows: int | None = None  # of an epoch, where the data is not here
    region: str | None = None  # or provider, whose prices count; None: the cheapest anywhere
    assumed: Assumed = Assumed()
    compiles: bool = False  # with the target's compiler, where it is here
    tries: bool = False  # what would make it fit, where it does not: some seconds more


PLAIN = PlanRequest()


@uncollected()
def planned(
    described: Described,
    target: Target,
    known: Prices,
    request: PlanRequest,
    console: Console | None = None,
) -> Plan:
    """The plan of a run that is laid out on a target."""
    described = divided(described, target)
    traced = tracing.trace(described, target)
    length = extent(described, request.rows, console)
    run, chip = described.run, target.chip
    memory = estimate = memories.memory(traced)
    report = compiler.find(_as_chosen(described), target) if request.compiles else None
    if isinstance(report, CompilerReport):
        memory = memory.as_compiled(report.peak_bytes)
    time = times.time(traced)
    cost = time and costs.cost(
        _averaged(described, target, time),
        length,
        target,
        known,
        every=run.checkpoint.every,
        saved=costs.saved_bytes(memory),
        where=request.region,
        assumed=request.assumed,
    )
    notes = [*target.notes, *precision.warnings(run.precision, chip.kind, chip)]
    notes += alignment.warnings(checks.widths(run), chip.kind, chip)
    notes += [length.unknown] if length.unknown else []
    if len(stages := run.objective.stages) > 1:
        notes.append(
            f"memory and step are those of the last of {len(stages)} stages, {stages[-1].name}, "
            f"from {stages[-1].begins:.0%} of the run on; the run counts the steps of each"
        )
    if isinstance(report, compiler.NoCompiler):
        notes.append(f"not compiled: {report.why}")
    notes += [time.fitted.note] if time and time.fitted else []
    notes += [time.loops.note] if time and time.loops and time.bound == "latency" else []
    notes += cost.notes if cost else [f"no speed estimate for {chip.name}s"]
    check = CompilerCheck(report, estimate.total) if isinstance(report, CompilerReport) else None
    tried = None
    if request.tries and not memory.fits:
        too_low = max(1.0, memory.total / estimate.total)  # by the compiler, where it ran
        tried = changes.several(traced, memory, too_low)
    return Plan(
        recipe=described.name,
        target=target,
        settings=settings(described),
        extent=length,
        memory=memory,
        time=time,
        cost=cost,
        mesh_reason=described.layout.why,
        notes=notes,
        tried=tried,
        compiled=check,
    )


def _averaged(described: Described, target: Target, last: Time) -> Time:
    """Step time in the mean of a run, of whose stages that of the last is known."""
    stages, parts = described.run.objective.stages, dict.fromkeys(last.parts, 0.0)
    ends = [*(stage.begins for stage in stages[1:]), 1.0]
    for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
        is_last = number == len(stages) - 1
        own = last if is_last else times.time(tracing.trace_stage(described, target, number))
        assert own is not None
        share = end - stage.begins
        for name, seconds in own.parts.items():
            parts[name] = parts.get(name, 0.0) + share * seconds
    return last._replace(parts=parts)


def _as_chosen(described: Described) -> Layers:
    """The recipe of a run, with as many microbatches as were chosen for it."""
    if described.divided is None:
        return described.layers
    keys = {"train": {"microbatch": None, "accumulation": described.divided.microbatches}}
    overrides = overlay(described.layers.command_line, keys)
    return replace(described.layers, command_line=overrides)


def _plain(change: Change) -> dict[str, Any]:
    seconds = change.time and change.time.seconds
    total = round(change.memory.total)
    return {"keys": change.keys, "total_bytes": total, "step_seconds": seconds}


def settings(described: Described) -> dict[str, Any]:
    """Settings of a run, from the recipe or chosen."""
    train, batches, kernel = described.run.train, described.batches, described.attention
    return {
        "batch": batches.rows,
        "rows_per_device": batches.per_device,
        "accumulation": batches.accumulation,
        "row_tokens": described.run.data.length,
        "mesh": dict(described.mesh.shape),
        "remat": train.remat,
        "layers_per_loop": described.layers_per_loop,
        "compute": described.compute,
        "attention": None if kernel is None else kernel.name,
    }
