"""Plan of a run that starts: what it will take, and what to change where that is too much."""

import dataclasses
from pathlib import Path
from typing import Any

from windlass.planning import exhausted, prices, targets, trials
from windlass.planning import memory as memories
from windlass.planning import plan as plans
from windlass.planning import time as times
from windlass.planning.memory import Memory
from windlass.planning.plan import PlanRequest
from windlass.planning.targets import Target
from windlass.planning.time import Time
from windlass.planning.traced import MakeCall, trace
from windlass.planning.trials import Trials
from windlass.program.described import Described, Divided
from windlass.telemetry.memory import device_limit


def plan(described: Described, rows: int) -> dict[str, Any]:
    """Plan of a run on the devices it has; `rows` are those of an epoch.

    From shapes alone, in the time in which a step is traced: nothing is compiled for it.
    """
    there, target = _absent(described)
    estimate = plans.planned(there, target, prices.load(), PlanRequest(rows=rows))
    return dataclasses.replace(estimate, memory=_limited(estimate.memory, described)).as_dict()


def call_time(described: Described, make: MakeCall) -> tuple[Time, Target] | None:
    """Time of a call on the devices of a run; None where there is no speed estimate for them."""
    there, target = _absent(described)
    if not target.chip.peak:
        return None
    time = times.time(trace(there, target, make))
    return time and (time, target)


def divide(described: Described) -> Divided:
    """Fewest microbatches in which a step fits, by tracing a few."""
    there, target = _absent(described)
    return trials.divide(Trials(there, target, limit=device_limit(described.devices)))


def explain(described: Described, error: str, when: str, folder: Path) -> str:
    """Explanation of an out-of-memory error, and what would fit."""
    try:
        traced = trace(*_absent(described))
        memory = _limited(memories.memory(traced), described)
        return exhausted.explain(traced, memory, error, when, folder)
    # A fault in the explanation must not hide that memory ran out.
    except Exception as fault:
        return exhausted.bare(error, fault, when, folder)


def _absent(described: Described) -> tuple[Described, Target]:
    """A run on stand-ins for its devices, on which nothing is computed."""
    target = targets.of(described.devices)
    return dataclasses.replace(described, devices=target.absent), target


def _limited(memory: Memory, described: Described) -> Memory:
    """With what the devices themselves say that a program may use, where they do."""
    limit = device_limit(described.devices)
    return memory if limit is None else memory._replace(limit=limit)
