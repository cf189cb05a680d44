"""Profile of a step: the operations of a trace by part of the model, with time and FLOP/s."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from windlass.analysis.hlo import Instruction, Text

# Named scopes of the layers; operations outside of all of them are of no part.
PARTS = (
    *("attention", "deltanet", "embedding", "experts", "head", "mlp", "norm", "optimizer"),
    *("reservoir", "residual"),
)
OTHER = "other"
TOP, WIDEST = 10, 36  # operations that are listed, and letters of a name

_NAME = re.compile(r'op_name="([^"]*)"')
_PART = re.compile(rf"(?<![\w.])({'|'.join(PARTS)})(?![\w.])")
# What other operations run in, which are in the trace themselves.
_AROUND = ("while", "conditional", "call")


class TracedOperation(NamedTuple):
    """An operation of the compiled step, however often it runs: all numbers are of one step."""

    name: str
    part: str
    what: str  # primitive and shape
    seconds: float
    calls: float
    flops: float  # of its matmuls


class StepProfile(NamedTuple):
    """Operations of a step on a device, the most expensive first."""

    operations: list[TracedOperation]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.operations)

    @property
    def by_part(self) -> dict[str, float]:
        """Share of the time by part of the model, the largest first."""
        times: Counter[str] = Counter()
        for one in self.operations:
            times[one.part.partition(",")[0]] += round(one.seconds * 1e9)
        whole = times.total() or 1
        return {part: time / whole for part, time in times.most_common()}


def read(trace: Path, program: str, steps: int) -> StepProfile:
    """The operations of a trace of some steps of a compiled program, averaged over devices."""
    text = Text(program)
    module = re.match(r"HloModule ([\w.\-]+)", program)
    known = {one.name: one for several in text.computations.values() for one in several}
    nanoseconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    devices = set()
    for device, event, about in _events(ProfileData.from_file(str(trace))):
        if module is not None and about.get("hlo_module", module[1]) != module[1]:
            continue
        operation = _operation(str(about.get("hlo_op") or event.name), known)
        if operation is not None and operation.kind not in _AROUND:
            devices.add(device)
            nanoseconds[operation.name] += event.duration_ns
            calls[operation.name] += 1
    runs = steps * max(1, len(devices))
    operations = [
        TracedOperation(
            name=name,
            part=_part(known[name], text),
            what=_what(known[name], text),
            seconds=time / 1e9 / runs,
            calls=calls[name] / runs,
            flops=text.flops_of(known[name]) * calls[name] / runs,
        )
        for name, time in nanoseconds.items()
    ]
    return StepProfile(sorted(operations, key=lambda one: -one.seconds))


def _events(traced: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Events that may be operations, with the device of each and its statistics."""
    for plane in traced.planes:
        is_device = plane.name.startswith("/device:")
        for line in plane.lines:
            # Of a GPU the kernels of a stream, of a TPU its operations; other lines repeat them.
            if is_device and not line.name.startswith(("Stream", "XLA Ops")):
                continue
            for event in line.events:
                about = dict(event.stats)
                if is_device or "hlo_op" in about:
                    yield (plane.name, about.get("device_ordinal")), event, about


def _operation(name: str, known: dict[str, Instruction]) -> Instruction | None:
    """The instruction that an event is named after: plainly, by its text, or as a kernel is."""
    first = re.match(r"%?([\w.\-]+)", name)
    plain = first[1] if first else name
    return known.get(plain) or known.get(re.sub(r"_(\d+)$", r".\1", plain))


def _part(operation: Instruction, text: Text) -> str:
    """Part of the model by the scopes of an operation, or else of most that it is fused of."""
    if (own := _scope(operation)) is not None:
        return own
    fused = [scope for one in text.fused(operation) if (scope := _scope(one)) is not None]
    return Counter(fused).most_common(1)[0][0] if fused else OTHER


def _what(operation: Instruction, text: Text) -> str:
    """The primitive that an operation is named after, or a matmul where one is in it, and shape."""
    named = _NAME.search(operation.text)
    primitive = named[1].rpartition("/")[2] if named else operation.kind
    primitive = "matmul" if text.flops_of(operation) else primitive
    return f"{primitive} {re.sub(r'{[^}]*}', '', operation.shape)}"


def _scope(operation: Instruction) -> str | None:
    """The innermost part in the name of an operation, and the pass that it is of."""
    named = _NAME.search(operation.text)
    parts = _PART.findall(named[1]) if named else []
    if named is None or not parts:
        return None
    if "rematted_computation" in named[1]:
        return f"{parts[-1]}, recomputed"
    return f"{parts[-1]}, backward" if "transpose(" in named[1] else parts[-1]


def table(profile: StepProfile, peak: float | None) -> list[str]:
    """The most expensive operations, a line each, with the share of a device's peak FLOP/s."""
    title = ["part", "operation", "in the trace"]
    title += ["ms per step", "share", "calls", *(["of peak"] if peak else [])]
    rows = [title, *(_row(one, profile.seconds, peak) for one in profile.operations[:TOP])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _row(one: TracedOperation, whole: float, peak: float | None) -> list[str]:
    row = [one.part, _short(one.what), _short(one.name)]
    row += [f"{1000 * one.seconds:.3f}", f"{one.seconds / whole:.1%}"]
    row.append(f"{one.calls:.0f}")
    if peak:
        row.append(f"{one.flops / (one.seconds * peak):.0%}" if one.flops else "")
    return row


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.ljust(width) if place < 3 else text.rjust(width)
