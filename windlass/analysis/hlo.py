"""HLO of a compiled program: its FLOPs and memory traffic, loops counted as often as they run.

A compiler's own count has every loop once. Here a loop counts as often as it runs, where that is
known; a kernel that is written elsewhere counts nothing, as its text says nothing about it.
"""

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "token": 0}  # others say their bits

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
# Of an operation that it has no estimate for, the compiler reports numbers near 2^64.
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,17})"')
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")  # a memory space other than HBM
# What moves nothing: it names what is there.
_NAMES = frozenset(
    "parameter constant tuple get-tuple-element bitcast while call conditional after-all "
    "opt-barrier async-start".split()
)


class Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    text: str


class Text:
    """HLO text of a compiled program: its computations, and the execution count of each."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = here = ""
        for line in text.splitlines():
            if opened := _COMPUTATION.match(line):
                here = opened[1]
                self.computations[here] = []
                self.entry = here if line.startswith("ENTRY") else self.entry
            elif body := _OPERATION.match(line):
                definition = re.sub(r"/\*.*?\*/", "", body[2])
                self.computations.setdefault(here, []).append(_operation(body[1], definition))

    @cached_property
    def times(self) -> Counter[str]:
        """Execution count of each computation."""
        times: Counter[str] = Counter()

        def visit(name: str, count: int) -> None:
            times[name] += count
            for operation in self.computations.get(name, []):
                for called, often in self._calls(operation):
                    visit(called, count * often)

        visit(self.entry, 1)
        return times

    @property
    def flops(self) -> int:
        """FLOPs of matmuls, on one device."""
        return sum(
            self.times[name] * _flops(operation, shapes) for name, shapes, operation in self._all()
        )

    def flops_of(self, operation: Instruction) -> int:
        """FLOPs of the matmuls of an operation that runs once, what is fused into it included."""
        own = _flops(operation, self._shapes)
        return own + sum(_flops(one, self._shapes) for one in self.fused(operation))

    def fused(self, operation: Instruction) -> Iterator[Instruction]:
        """Instructions that an operation is fused of."""
        if operation.kind.startswith("fusion"):
            for called, _ in self._calls(operation):
                for one in self.computations.get(called, []):
                    yield one
                    yield from self.fused(one)

    @cached_property
    def _shapes(self) -> dict[str, str]:
        """Shapes of all instructions, whose names are unique in a program."""
        return {one.name: one.shape for several in self.computations.values() for one in several}

    @property
    def moved_bytes(self) -> int:
        """Memory traffic: bytes that operations read from HBM and write to it."""
        return sum(
            self.times[name] * self._moved(operation, shapes)
            for name, shapes, operation in self._all()
            if name not in self._fused_bodies
        )

    @property
    def cycles(self) -> int | None:
        """Cycles by a TPU's compiler's estimate, without custom kernels and the interconnect."""
        cycles = [
            self.times[name] * int(match[1])
            for name, _, operation in self._all()
            if name not in self._fused_bodies and (match := _CYCLES.search(operation.text))
        ]
        return sum(cycles) if cycles else None

    @cached_property
    def _fused_bodies(self) -> set[str]:
        """The computations that are part of an operation of another, and not run by themselves."""
        return {
            called
            for _, _, operation in self._all()
            if operation.kind.startswith(("fusion", "reduce"))
            for called, _ in self._calls(operation)
        }

    def _all(self) -> Iterator[tuple[str, dict[str, str], Instruction]]:
        for name, operations in self.computations.items():
            shapes = {operation.name: operation.shape for operation in operations}
            for operation in operations if self.times[name] else ():
                yield name, shapes, operation

    def _calls(self, operation: Instruction) -> Iterator[tuple[str, int]]:
        if operation.kind.endswith(("-done", "-update")):
            return  # it was called where it began
        trips = self._trips(operation) if operation.kind == "while" else 1
        for names in _CALLED.findall(operation.text):
            for name in names.split(", "):
                yield name.lstrip("%"), trips

    def _trips(self, operation: Instruction) -> int:
        """Trip count of a loop: as it says, or else the only number in its condition."""
        if known := _TRIPS.search(operation.text):
            return int(known[1])
        condition = re.search(r"condition=%?([\w.\-]+)", operation.text)
        instructions = self.computations.get(condition[1], []) if condition else []
        numbers = re.findall(r" constant\((\d+)\)", "\n".join(one.text for one in instructions))
        return int(numbers[0]) if len(numbers) == 1 else 1

    def _moved(self, operation: Instruction, shapes: Mapping[str, str]) -> int:
        if operation.kind in _NAMES or operation.kind.endswith("-done"):
            return 0
        if operation.kind == "dynamic-update-slice":
            return 2 * size(shapes.get(operation.operands[1], ""))
        if operation.kind == "dynamic-slice":
            return 2 * size(operation.shape)
        read = [size(shapes.get(operand, "")) for operand in operation.operands]
        written = size(operation.shape)
        if operation.kind in ("fusion", "fusion-start"):
            called = next(self._calls(operation))[0]
            written = size(self.computations[called][-1].shape)
            read, written = self._fused(called, read, written)
        elif operation.kind.endswith("-start"):  # whose shape has what goes in, too
            written = sum(read)
        return sum(read) + written

    def _fused(self, name: str, read: list[int], written: int) -> tuple[list[int], int]:
        """Traffic of a fusion: of what it only reads or writes a slice of, that slice alone."""
        operations = self.computations.get(name, [])
        shapes = {operation.name: operation.shape for operation in operations}
        users: dict[str, list[Instruction]] = defaultdict(list)
        for operation in operations:
            for operand in operation.operands:
                users[operand].append(operation)

        def readers(name: str) -> Iterator[tuple[str, Instruction]]:
            for user in users[name]:
                if user.kind == "bitcast":
                    yield from readers(user.name)
                else:
                    yield name, user

        sizes = list(read)
        for operation in operations:
            if operation.kind != "parameter":
                continue
            number = int(re.findall(r"parameter\((\d+)\)", operation.text)[0])
            uses = list(readers(operation.name))
            first = [one for under, one in uses if one.operands[0] == under]
            cuts = [one for one in first if one.kind == "dynamic-slice"]
            puts = [one for one in first if one.kind == "dynamic-update-slice"]
            if number < len(sizes) and uses and len(cuts) + len(puts) == len(uses):
                sizes[number] = sum(size(one.shape) for one in cuts)
                for put in puts:
                    written += size(shapes.get(put.operands[1], "")) - size(put.shape)
        return sizes, max(0, written)


def size(shape: str) -> int:
    """Bytes of the arrays that a shape names, in HBM."""
    return sum(
        math.prod(int(side) for side in sides.split(",") if side) * width(of)
        for of, sides, layout in _ARRAY.findall(shape)
        if not _ELSEWHERE.search(layout)
    )


def width(of: str) -> int:
    bits = re.search(r"\d+", of)
    return WIDTHS[of] if of in WIDTHS else max(1, int(bits[0] if bits else 8) // 8)


def _operation(name: str, text: str) -> Instruction:
    if text.startswith("("):  # a tuple, which may hold tuples
        depth = itertools.accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in text)
        end = next(i for i, level in enumerate(depth) if level == 0)
        shape, rest = text[: end + 1], text[end + 2 :]
    else:
        shape, _, rest = text.partition(" ")
    kind, _, arguments = rest.partition("(")
    operands = re.findall(r"%([\w.\-]+)", arguments.partition(")")[0])
    return Instruction(name, shape, kind, operands, text)


def _flops(operation: Instruction, shapes: Mapping[str, str]) -> int:
    if operation.kind == "dot":
        return _product(operation, shapes, r"lhs_contracting_dims=\{([\d,]*)\}")
    if operation.kind == "convolution":
        return _convolution(operation, shapes)
    if operation.kind == "custom-call" and "$matmul" in operation.text:
        return _product(operation, shapes, r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    return 0


def _product(operation: Instruction, shapes: Mapping[str, str], contracted: str) -> int:
    left = _sides(shapes.get(operation.operands[0], ""))
    match = re.search(contracted, operation.text)
    axes = [int(axis) for axis in re.findall(r"\d+", match[1] if match else "")]
    return 2 * math.prod(_sides(operation.shape)) * math.prod(left[axis] for axis in axes)


def _convolution(operation: Instruction, shapes: Mapping[str, str]) -> int:
    """A TPU's matmul: axes that are no batch, feature or output are slid along each other."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.text)
    assert labels is not None
    left, right, out = (
        dict(zip(names, _sides(shape), strict=False))
        for names, shape in zip(
            labels.groups(),
            [*(shapes.get(operand, "") for operand in operation.operands[:2]), operation.shape],
            strict=True,
        )
    )
    window = re.search(r"window=\{(.*?)\}", operation.text)
    attributes = dict(re.findall(r"(\w+)=([\w\-]+)", window[1])) if window else {}
    slid = sorted(name for name in out if name.isdigit())
    overlaps = 1
    for i, name in enumerate(slid):
        low = [int(pad.split("_")[0]) for pad in attributes.get("pad", "").split("x") if pad]
        steps = {
            key: [int(n) for n in attributes[key].split("x")] if key in attributes else []
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        }
        stride, apart, spread = (
            steps[key][i] if steps[key] else 1 for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        first = low[i] if low else 0
        last = (left.get(name, 1) - 1) * apart
        places = (
            place * stride + tap * spread - first
            for place in range(out[name])
            for tap in range(right.get(name, 1))
        )
        overlaps *= sum(0 <= at <= last and at % apart == 0 for at in places)
    return 2 * out.get("b", 1) * out.get("f", 1) * right.get("i", 1) * overlaps


def _sides(shape: str) -> list[int]:
    """Dimensions of the first array that a shape names."""
    match = _ARRAY.search(shape)
    return [int(side) for side in match[2].split(",") if side] if match else []


def flags(environ: Mapping[str, str]) -> str:
    """Compiler flags in the environment, which decide what program a compiler makes."""
    return json.dumps({name: environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")})
