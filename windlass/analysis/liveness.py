"""The arrays of a program as a compiler holds them, at the moment when there are most.

A compiler computes most operations where their results are used, and holds only what goes into or
comes out of the others: matrix products, loops, kernels, collectives. So a program that is merely
traced says nearly all about what the compiled one will hold, and when.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from windlass.analysis.flattened import Flattened, Operation
from windlass.analysis.per_device import shape_there
from windlass.analysis.primitives import Kind, constants_and_carry, sub_jaxprs

# Computed where it is used.
_FUSED = {Kind.ELEMENTWISE, Kind.RANDOM, Kind.LAYOUT, Kind.INDEXING, Kind.TRANSPOSE}
# Computed where it is read, with a result that is waited for.
_REDUCED = {Kind.REDUCTION, Kind.CUMULATIVE}
_IN_PLACE = {*_FUSED, Kind.UPDATE}
_CONTRACTED = {Kind.MATMUL, Kind.CONVOLUTION}


class Array(NamedTuple):
    """An array on one device."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]  # its shape on all devices together
    dtype: str
    bytes: int
    maker: str  # the operation that made it
    depth: int = 0  # the loops that it is made in one round of


class Habits(NamedTuple):
    """What some compilers do and others do not."""

    adds_to_products: bool  # what is added to a product is added while it is made
    reuses: bool  # a result may lie where something it was computed from lay, however indirectly
    shares: bool  # what several operations want is computed once
    draws_apart: bool  # random bits are by a kernel of their own, whatever they are used for
    lingers: bool  # what was gathered for a product stays until the next one is done
    bytes_of: Callable[[tuple[int, ...], int], int]  # of an array of a shape and an item size


def largest(program: Jaxpr, habits: Habits) -> list[Array]:
    """The arrays that a program makes for itself, at the moment when they are largest together.

    Arguments are not among them, nor are results, which are put in the place of arguments.
    """
    return _Heap(Flattened(program), habits).largest()


class _Heap:
    def __init__(self, program: Flattened, habits: Habits):
        self.operations, self.habits = program.operations, habits
        self.variables, self.inputs = program.variables, set(program.inputs)
        self.results = {value for value in program.outputs if value is not None}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.maker: dict[int, int] = {}
        for i, operation in enumerate(self.operations):
            for value in operation.reads:
                self.readers[value].append(i)
            self.maker |= dict.fromkeys(operation.results, i)
        self.wanted: dict[int, bool] = {}
        self.behind: dict[int, frozenset[int]] = {}
        self.used: dict[int, int] = {}  # where what is computed on the way is used at last
        self.held = set(filter(self.is_held, self.maker))

    def largest(self) -> list[Array]:
        ends: dict[int, set[int]] = defaultdict(set)
        for value, i in self.ends.items():
            ends[i].add(value)
        held: dict[int, int] = {}
        most, then, inside = 0, held, []
        for i, operation in enumerate(self.operations):
            for value in operation.results:
                if value not in self.held:
                    continue
                taken = self.place(operation, value, held, ends[i])
                if taken is not None:
                    ends[i].remove(taken)
                    del held[taken]
                held[value] = 0 if value in self.results else self.bytes_of(value)
            inner = self.inner(operation)
            total = sum(held.values()) + sum(array.bytes for array in inner)
            if total > most:
                most, then, inside = total, dict(held), inner
            for value in ends[i]:
                held.pop(value, None)
        return [self.array(value, size) for value, size in then.items() if size] + inside

    def inner(self, operation: Operation) -> list[Array]:
        """What a round of a loop makes for itself."""
        if operation.kind is not Kind.LOOP:
            return []
        bodies = [largest(body, self.habits) for body in sub_jaxprs(operation.equation)]
        most = max(bodies, key=lambda arrays: sum(array.bytes for array in arrays), default=[])
        return [array._replace(depth=array.depth + 1) for array in most]

    def place(
        self, operation: Operation, value: int, held: dict[int, int], ending: set[int]
    ) -> int | None:
        """What is no longer needed and as large, so that the value can lie there."""
        if operation.kind in _IN_PLACE:
            reads = operation.reads
        elif (carried := _carried(operation, value)) is not None:
            reads = [carried]
        else:
            return None
        size = self.bytes_of(value)
        for read in reads:
            near = self.sources(read) if self.habits.reuses else {read}
            for source in near & held.keys() & ending:
                if held[source] == size:
                    return source
        return None

    @cached_property
    def ends(self) -> dict[int, int]:
        """The last operation that needs each value that is held."""
        used = self.used
        for i in reversed(range(len(self.operations))):
            for value in self.operations[i].results:
                used[value] = max([i, *(self.met(j) for j in self.readers[value])])
        ends = {value: self.maker[value] for value in self.held}
        for value, i in used.items():
            if value not in self.held:
                for source in self.sources(value):
                    ends[source] = max(ends[source], i)
        for i, operation in enumerate(self.operations):
            for source in frozenset().union(*map(self.sources, operation.reads)):
                ends[source] = max(ends[source], self.lingering(i, source))
        for value in self.results:
            ends |= dict.fromkeys(self.sources(value), len(self.operations))
        return ends

    def met(self, i: int) -> int:
        """When an operation is computed: in its turn, or where its result is used."""
        writes = self.operations[i].results
        return i if not writes or writes[0] in self.held else self.used[writes[0]]

    def lingering(self, i: int, source: int) -> int:
        is_gathered = self.operations[self.maker[source]].kind is Kind.RESHARD
        if not (self.habits.lingers and is_gathered):
            return i
        later = range(i + 1, len(self.operations))
        heavy = {Kind.LOOP, *_CONTRACTED}
        following = next((j for j in later if self.operations[j].kind in heavy), i)
        return i if self.operations[following].kind is Kind.LOOP else self.met(following)

    def is_held(self, value: int) -> bool:
        i = self.maker[value]
        if self.is_renamed(i):
            return False
        if self.is_fused(i) and self.operations[i].kind not in _REDUCED:
            return self.is_wanted(value) or (self.habits.shares and self.is_shared(value))
        return not self.is_added_to(i)

    def is_shared(self, value: int) -> bool:
        """Whether several operations want a value, none of which it is then computed in."""
        made = self.operations[self.maker[value]].primitive
        return len(self.readers[value]) > 1 and not made.is_cheap

    def is_fused(self, i: int) -> bool:
        kind = self.operations[i].kind
        if kind is Kind.RANDOM and self.habits.draws_apart:
            return False
        return kind in _FUSED | _REDUCED or self.is_cut(i)

    def is_renamed(self, i: int) -> bool:
        operation = self.operations[i]
        if operation.kind is Kind.RESHARD and operation.reads:
            return self.shape(operation.reads[0]) == self.shape(operation.results[0])
        return operation.kind in (Kind.ALIAS, Kind.RESIDUAL)

    def is_cut(self, i: int) -> bool:
        """Whether only a piece of an array stays on each device: sums over devices wait for it."""
        operation = self.operations[i]
        if operation.kind is not Kind.RESHARD or not operation.reads:
            return False
        before, after = self.shape(operation.reads[0]), self.shape(operation.results[0])
        return math.prod(before) > math.prod(after)

    def is_added_to(self, i: int) -> bool:
        """Whether a product only goes into a sum or another precision, which is made at once."""
        operation = self.operations[i]
        if operation.kind not in _CONTRACTED or not self.habits.adds_to_products:
            return False
        (value,) = operation.results
        readers = [self.operations[j].name for j in self.readers[value]]
        goes_on = readers in (["add"], ["add_any"], ["convert_element_type"])
        return goes_on and value not in self.results

    def is_wanted(self, value: int) -> bool:
        """Whether something reads the value that can only read what is in memory."""
        if value not in self.wanted:
            self.wanted[value] = value in self.results or any(
                self.is_wanted(self.operations[i].results[0])
                if self.is_renamed(i)
                else not self.is_fused(i)
                for i in self.readers[value]
            )
        return self.wanted[value]

    def sources(self, value: int) -> frozenset[int]:
        """The values in memory that one is computed from: itself, if it is there."""
        if value not in self.behind:
            if value in self.inputs or value not in self.maker:
                found = frozenset[int]()
            elif value in self.held:
                found = frozenset([value])
            else:
                reads = self.operations[self.maker[value]].reads
                found = frozenset[int]().union(*map(self.sources, reads))
            self.behind[value] = found
        return self.behind[value]

    def shape(self, value: int) -> tuple[int, ...]:
        return shape_there(self.variables[value])

    def bytes_of(self, value: int) -> int:
        return self.habits.bytes_of(self.shape(value), _itemsize(self.variables[value]))

    def array(self, value: int, size: int) -> Array:
        maker, of = self.operations[self.maker[value]].name, self.variables[value].aval
        return Array(self.shape(value), of.shape, str(of.dtype), size, maker)


def _carried(operation: Operation, value: int) -> int | None:
    """What a loop begins with in the place of what it ends with."""
    if operation.name != "scan":
        return None
    (body,) = sub_jaxprs(operation.equation)
    first, carried = constants_and_carry(body, operation.equation)
    i = operation.results.index(value)
    return operation.arguments[first + i] if i < carried else None


def _itemsize(variable: Any) -> int:
    return getattr(variable.aval.dtype, "itemsize", 4)
