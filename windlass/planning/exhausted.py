"""Out-of-memory errors in the terms of the model: what filled memory, and what would fit."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from windlass import units
from windlass.checkpoint.store import folder_of, steps_in
from windlass.planning import time as times
from windlass.planning.changes import Tried, several
from windlass.planning.memory import Memory
from windlass.planning.traced import Traced
from windlass.processes import hosts
from windlass.units import size

LARGEST = 4  # parts that are named
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)\s*([KMGT]?)(?:i?B|\b)"
# Of the compiler for TPUs, in its two wordings: how much would have been needed at least.
NEEDED = (rf"required for HLO temporaries \({_SIZE}\)", rf"Used {_SIZE} of ")
WANTED = rf"(?:allocate|allocating) {_SIZE}"  # of GPUs: by the one allocation that failed


class ReportedSizes(NamedTuple):
    """The sizes that an out-of-memory error reports, in bytes."""

    needed: float | None
    wanted: float | None


def reported_sizes(error: str) -> ReportedSizes:
    """Parse the sizes in a message of XLA's compilers or allocators."""
    needed = [match for one in NEEDED if (match := re.search(one, error))]
    wanted = re.search(WANTED, error)
    return ReportedSizes(
        _bytes(needed[0]) if needed else None, None if wanted is None else _bytes(wanted)
    )


def explain(traced: Traced, memory: Memory, error: str, when: str, folder: Path) -> str:
    """Explanation of an out-of-memory error: its largest parts, and two or three ways out."""
    reported = reported_sizes(error)
    lines = [
        f"out of memory {when}: {_lacking(traced, memory, reported)}",
        _largest(traced, memory),
    ]
    has_changes = False
    if hosts.is_first():  # the others would wait for its answers, and it may go on without them
        least = max(memory.total, reported.needed or 0.0, memory.limit)
        tried = several(traced, memory, too_low=least / memory.total)
        has_changes = bool(tried.changes)
        lines += list(_offered(traced, tried))
    return "\n".join([*lines, _left(folder, has_changes)])


def bare(error: str, fault: Exception, when: str, folder: Path) -> str:
    """The same from JAX's message alone, where nothing else is known."""
    first = error.partition("\n")[0]
    why = f"what fills it is not known ({type(fault).__name__}: {fault})"
    return f"out of memory {when}: {first}\n{why}\n{_left(folder, has_changes=False)}"


def _lacking(traced: Traced, memory: Memory, reported: ReportedSizes) -> str:
    limit, needed = size(memory.limit), max(memory.total, reported.needed or 0.0)
    what = f"on each {traced.target.chip.name}, of which a program may use {limit}"
    if needed > memory.limit:
        return f"a step needs about {size(needed)} {what}: {size(needed - memory.limit)} too much"
    wanted = "more" if reported.wanted is None else f"{size(reported.wanted)} more"
    return (
        f"a step needs about {size(memory.total)} {what}, and {wanted} could not be allocated: "
        "something else holds memory there, or this estimate is too low"
    )


def _largest(traced: Traced, memory: Memory) -> str:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    origins = _origins(traced)
    named = [
        f"{name} {size(needed)}" + (f" ({origins[name]})" if name in origins else "")
        for name, needed in parts[:LARGEST]
    ]
    rest = sum(needed for _, needed in parts[LARGEST:])
    return f"the most of it: {', '.join(named)}" + (f"; all else {size(rest)}" if rest else "")


def _origins(traced: Traced) -> dict[str, str]:
    """Settings of the recipe that parts of memory come from."""
    run, batches = traced.described.run, traced.batches
    sequences = f"{units.counted(batches.per_device, 'sequence')} of {run.data.length} tokens"
    optimiser = type(run.optim).__module__.rpartition(".")[2]
    return {
        "activations": f"of {sequences}, train.remat={run.train.remat}",
        "layer": f"temporaries of one layer, of {sequences}",
        "copies": f"of weights in {traced.described.compute}",
        "logits": f"of {sequences}, vocabulary {run.model.vocab:,}",
        "optimiser": optimiser,
        "average": f"train.ema={run.train.ema}",
    }


def _offered(traced: Traced, tried: Tried) -> Iterable[str]:
    if not tried.changes:
        if tried.least is not None:
            keys, needed = tried.least.keys, size(tried.least.memory.total)
            yield f"nothing that was tried would fit; the least is {needed}, by {keys}"
        return
    now = times.time(traced)
    width = max(len(one.keys) for one in tried.changes)
    yield "what would fit:"
    for one in tried.changes:
        speed = (
            "" if now is None or one.time is None else f", {slower(one.time.seconds / now.seconds)}"
        )
        remark = f"; {one.remark}" if one.remark else ""
        yield f"  {one.keys:<{width}}  {size(one.memory.total)}{speed}{remark}"


def slower(ratio: float) -> str:
    """Step time relative to another's, in words."""
    if round(100 * (ratio - 1)) == 0:
        return "a step as fast"
    return f"a step {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"


def _left(folder: Path, has_changes: bool) -> str:
    how = "the same command with one of these" if has_changes else "the same command"
    steps: Sequence[int] = steps_in(folder_of(folder))
    if not any(steps):
        return f"Nothing was trained yet: {how} begins again"
    return (
        f"Nothing up to step {steps[-1]}, the newest checkpoint in {folder}, is lost: {how} goes "
        "on from there"
    )


def _bytes(match: re.Match) -> float:
    return float(match[1]) * UNITS[match[2]]
