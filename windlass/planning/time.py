"""Step time by part: a roofline of matmuls, attention, memory traffic, collectives and latency."""

from typing import NamedTuple

from windlass import units
from windlass.analysis.flops import step_flops
from windlass.analysis.fusion import Amount
from windlass.analysis.work import KERNELS, Collective, Work
from windlass.devices.sketch import sketched
from windlass.planning import calibration, efficiency
from windlass.planning.calibration import Fitted
from windlass.planning.efficiency import (
    Efficiency,
    Rates,
    attention_seconds,
    matmul_seconds,
    memory_seconds,
)
from windlass.planning.topology import Reach, reaches
from windlass.planning.traced import STEPS, Traced
from windlass.program.built import Built
from windlass.program.described import Described
from windlass.program.programs import Programs

PARTS = (
    *("matmuls", "attention", "head", "elementwise", "loops", "optimiser"),
    *("communication", "host"),
)
SLOWEST = 3e9  # bytes/s between devices where nothing is published: what the slowest network has
DISPATCH = 1e-3  # seconds a host takes to start a step; the device waits for no less


class Loops(NamedTuple):
    """Rounds of the loops of a step, over layers and over time, and the latency of each."""

    rounds: Amount  # one after the other
    latency_seconds: Amount  # a round, besides its matmuls and its traffic
    source: str  # of that latency

    @property
    def note(self) -> str:
        each = units.seconds(self.latency_seconds)
        return f"{round(self.rounds):,} rounds of loops a step, at {each} each: {self.source}"


class Time(NamedTuple):
    """Step time in seconds, by part; what is hidden behind something else is in no part."""

    parts: dict[str, Amount]
    error: Amount  # the share by which `seconds` may be wrong, either way
    bound: str  # compute, memory, latency (of loops), communication or host
    flops: Amount  # that the model needs for the step, on all devices together
    source: str = ""  # of the table of the chip
    loops: Loops | None = None  # whose latency is the part of that name
    fitted: Fitted | None = None  # the calibration by the user's own runs, where there is one

    @property
    def seconds(self) -> Amount:
        return sum(self.parts.values())


def time(traced: Traced) -> Time | None:
    """Step time of a traced program, calibrated by the user's own runs where there are any.

    None where the catalogue has no speed of such devices.
    """
    if not traced.target.chip.peak:
        return None
    uncalibrated, fitted = by_table(traced), calibration.find(traced.target.chip.name)
    if fitted is None:
        return uncalibrated
    parts = calibration.scaled(uncalibrated.parts, fitted.factors)
    return uncalibrated._replace(parts=parts, error=fitted.error, fitted=fitted)


def by_table(traced: Traced) -> Time:
    """Step time of a traced program, by the roofline of its chip."""
    return estimate(traced, traced.work, efficiency.rates(traced.target.chip))


def estimate(traced: Traced, work: Work, rates: Rates) -> Time:
    parts: dict[str, Amount] = dict.fromkeys(PARTS, 0.0)
    bounds = {"compute": 0.0, "memory": 0.0, "latency": 0.0}
    for matmul in work.matmuls:
        seconds = matmul.times * matmul_seconds(matmul, rates)
        parts[matmul.part] += seconds
        is_floor = matmul.times * memory_seconds(matmul.moved, rates) > seconds / 2
        bounds["memory" if is_floor else "compute"] += seconds
    for call in work.attention:
        parts["attention"] += call.times * attention_seconds(call, rates)
    bounds["compute"] += parts["attention"]
    for part, moved in work.traffic.items():
        memory = memory_seconds(moved, rates)
        vector = work.operations.get(part, 0.0) / rates.efficiency.vector
        if part == KERNELS:
            memory, part = memory / rates.efficiency.kernels, "elementwise"
        parts[part] += max(memory, vector)
        bounds["memory" if memory > vector else "compute"] += max(memory, vector)
    each = rates.efficiency.loop_round
    parts["loops"] = bounds["latency"] = work.rounds * each
    computed = parts["matmuls"] + parts["attention"] + parts["head"]
    parts["communication"] = exposed(traced, work.collectives, computed, rates.efficiency)
    bounds["communication"] = parts["communication"]
    parts["host"] = bounds["host"] = max(0.0, DISPATCH - sum(parts.values()))
    spent = {name: seconds for name, seconds in parts.items() if seconds}
    bound = max(bounds, key=bounds.__getitem__)
    flops, table = model_flops(traced.described), rates.efficiency
    loops = Loops(work.rounds, each, table.loop_source)
    return Time(spent, table.error, bound, flops, table.source, loops)


def exposed(
    traced: Traced, collectives: list[Collective], computed: Amount, efficiency: Efficiency
) -> Amount:
    """Seconds of collectives that do not overlap with compute."""
    reach = reaches(traced.target, traced.split)
    hidden = blocking = 0.0
    for one in collectives:
        seconds = one.times * collective_seconds(one, reach.along(*one.axes), efficiency)
        # A tensor-parallel all-reduce is on the critical path: the next layer reads its result. And
        # an iteration ends when its gradients are reduced; only weights are all-gathered early.
        if one.kind == "all-gather" and "tensor" not in one.axes:
            hidden += seconds
        else:
            blocking += seconds
    return blocking + max(0.0, hidden - efficiency.overlap * computed)


def collective_seconds(one: Collective, reach: Reach, efficiency: Efficiency) -> Amount:
    """Time of a collective: a ring over the interconnect, then one over the network of groups."""
    passes = 2 if one.kind == "all-reduce" else 1
    seconds = 0.0
    if reach.ways > 1:
        speed = (reach.bandwidth or SLOWEST) * efficiency.links
        seconds += passes * one.moved * (reach.ways - 1) / reach.ways / speed
    if reach.groups > 1:
        speed = (reach.network or SLOWEST) * efficiency.links
        piece = one.moved / reach.ways
        seconds += passes * piece * (reach.groups - 1) / reach.groups / speed
    return seconds


def model_flops(described: Described) -> Amount:
    """Model FLOPs of a step, without recomputation: the same count as a run's own."""
    with described.scope(), sketched():
        programs = Programs(Built(described), STEPS)
        return step_flops(programs, *programs.abstract_state())
