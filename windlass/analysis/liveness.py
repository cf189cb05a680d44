"""Liveness analysis: the live buffers of a program at its peak, from the jaxpr alone.

A compiler fuses most operations into those that use their results, and materialises only what goes
into or comes out of the others: matmuls, loops, kernels, collectives. So the jaxpr determines
nearly all buffers of the compiled program, and how long each is live.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr

from windlass.analysis import scan
from windlass.analysis.flattened import Flattened, Operation
from windlass.analysis.per_device import device_shape, shape
from windlass.analysis.primitives import Kind, constants_and_carry, contraction, sub_jaxprs

# Fused into the operations that read it.
_FUSED = {Kind.ELEMENTWISE, Kind.RANDOM, Kind.LAYOUT, Kind.INDEXING, Kind.TRANSPOSE}
# Fused with what it reads; its result is a buffer.
_REDUCED = {Kind.REDUCTION, Kind.CUMULATIVE}
_IN_PLACE = {*_FUSED, Kind.UPDATE}
_SUMS = ("add", "add_any")
_CONTRACTED = {Kind.MATMUL, Kind.CONVOLUTION}
GROUPED = "ragged_dot_general"  # of rows with the matrix of each row's group


class Buffer(NamedTuple):
    """A buffer on one device."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]  # its shape on all devices together
    dtype: str
    bytes: int
    maker: str  # the operation that writes it
    depth: int = 0  # of nested loops whose body it is live in


class CompilerModel(NamedTuple):
    """Compiler model: what some compilers do and others do not."""

    fuses_epilogues: bool  # what is added to a matmul is part of its kernel
    reuses_buffers: bool  # of anything a result is computed from, however indirectly
    materializes_shared: bool  # what several operations read, instead of computing it in each
    has_random_kernel: bool  # random bits are never fused into what reads them
    bytes_of: Callable[[tuple[int, ...], int], int]  # of a buffer of a shape and an item size
    lanes: int | None  # width of a register that the innermost axis of an array is to fill
    indexed: float  # times its bytes, to read or add at indices of the innermost axis of an array
    sums_devices_at_once: bool  # without a buffer for what each has to add
    layers_per_round: int  # of a loop over layers, where their kinds take turns
    unstacked: float  # times its residuals, which a layer leaves until the end of an iteration
    has_residuals: bool  # what goes through a barrier to be read a second time is in memory
    zeros_at_once: bool  # of all arrays alike that loops of a program stack


def peak_buffers(program: Jaxpr, compiler: CompilerModel) -> list[Buffer]:
    """The live buffers of a program at its peak.

    Arguments are not among them, nor are results, which are donated the buffers of arguments.
    """
    return _Liveness(Flattened(program), compiler).peak_buffers()


class _Liveness:
    def __init__(self, program: Flattened, compiler: CompilerModel):
        self.operations, self.compiler = program.operations, compiler
        self.variables, self.inputs = program.variables, set(program.inputs)
        self.residuals = program.residuals if compiler.has_residuals else set[int]()
        self.results = {value for value in program.outputs if value is not None}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.maker: dict[int, int] = {}
        for i, operation in enumerate(self.operations):
            for value in operation.reads:
                self.readers[value].append(i)
            self.maker |= dict.fromkeys(operation.results, i)
        self.read_from_memory: dict[int, bool] = {}
        self.known_sources: dict[int, frozenset[int]] = {}
        self.used: dict[int, int] = {}  # the last use of a fused value
        self.materialized = set(filter(self.is_materialized, self.maker))

    def peak_buffers(self) -> list[Buffer]:
        ends: dict[int, set[int]] = defaultdict(set)
        for value, i in self.ends.items():
            ends[i].add(value)
        live: dict[int, int] = {}
        most, then, inside = 0, live, []
        for i, operation in enumerate(self.operations):
            live |= {value: self.bytes_of(value) for value in self.zeros[i]}
            for value in operation.results:
                if value not in self.materialized or value in live:
                    continue
                old = self.reused(operation, value, live, ends[i])
                if old is not None:
                    ends[i].remove(old)
                    del live[old]
                live[value] = 0 if value in self.results else self.bytes_of(value)
            inner = [*self.inner(operation), *self.relaid(i)]
            total = sum(live.values()) + sum(buffer.bytes for buffer in inner)
            if total > most:
                most, then, inside = total, dict(live), inner
            for value in ends[i]:
                live.pop(value, None)
        return [self.buffer(value, size) for value, size in then.items() if size] + inside

    @cached_property
    def zeros(self) -> dict[int, list[int]]:
        """Arrays that loops stack, by the first loop that stacks one of their shape and dtype.

        One kernel fills all of these with zeros, for all loops of a program.
        """
        found: dict[int, list[int]] = defaultdict(list)
        first: dict[tuple, int] = {}
        for i, operation in enumerate(self.operations if self.compiler.zeros_at_once else []):
            for value in self.materialized.intersection(scan.stacked(operation)) - self.results:
                like = self.shape(value), self.variables[value].aval.dtype
                found[first.setdefault(like, i)].append(value)
        return found

    def inner(self, operation: Operation) -> list[Buffer]:
        """The live buffers of the body of a loop at its peak."""
        if operation.kind is not Kind.LOOP:
            return []
        bodies = [peak_buffers(body, self.compiler) for body in sub_jaxprs(operation.equation)]
        most = max(bodies, key=lambda buffers: sum(buffer.bytes for buffer in buffers), default=[])
        return [
            buffer._replace(depth=buffer.depth + 1) for buffer in [*most, *self.left(operation)]
        ]

    def relaid(self, i: int) -> list[Buffer]:
        """The copy, in another layout, of an array that is indexed along its innermost axis.

        Such as the logits of candidates, and the gradient that is scattered there.
        """
        value = self.indexed(i)
        if value is None:
            return []
        return [self.buffer(value, round(self.compiler.indexed * self.bytes_of(value)))]

    def indexed(self, i: int) -> int | None:
        """The array that an operation reads, or adds to, at indices of its innermost axis."""
        operation = self.operations[i]
        numbers: Any = operation.equation.params.get("dimension_numbers")
        if operation.name == "gather" and operation.reads:
            value, axes = operation.reads[0], numbers.start_index_map
        elif operation.name == "scatter-add":
            value, axes = operation.results[0], numbers.scatter_dims_to_operand_dims
        else:
            return None
        return value if len(self.shape(value)) - 1 in axes else None

    def left(self, operation: Operation) -> list[Buffer]:
        """Residuals that the layers of an iteration leave until its end, all but one of them.

        Those that a loop stacks, or reads in the backward pass: beside these are weights alone, or
        the gradients of weights.
        """
        rounds = operation.equation.params.get("unroll", 1)
        layers = rounds * self.compiler.layers_per_round
        if operation.name != "scan" or layers == 1:
            return []
        (body,) = sub_jaxprs(operation.equation)
        first, carried = constants_and_carry(body, operation.equation)
        read, stacked = body.invars[first + carried :], body.outvars[carried:]
        residuals = sum(map(self.bytes_in, stacked)) - sum(map(self.bytes_in, read))
        if residuals < 0:  # the backward pass, which drops half of them on its way through kinds
            residuals *= -1.0 if rounds > 1 else -0.5
        size = round(self.compiler.unstacked * rounds * residuals * (layers - 1) / layers)
        return [Buffer((), (), "", size, operation.name)]

    def bytes_in(self, variable: Any) -> int:
        return self.compiler.bytes_of(device_shape(variable), _itemsize(variable))

    def reused(
        self, operation: Operation, value: int, live: dict[int, int], ending: set[int]
    ) -> int | None:
        """A buffer of the same size that is dead after the operation, which it may overwrite."""
        if operation.kind in _IN_PLACE:
            reads = operation.reads
        elif (carried := scan.carried(operation, value)) is not None:
            reads = [carried]
        elif (overwritten := _overwritten(operation, value)) is not None:
            reads = list(self.sources(overwritten))
        else:
            return None
        size = self.bytes_of(value)
        for read in reads:
            near = self.sources(read) if self.compiler.reuses_buffers else {read}
            for source in near & live.keys() & ending:
                if live[source] == size:
                    return source
        return None

    @cached_property
    def ends(self) -> dict[int, int]:
        """The end of the live range of each buffer: the last operation that reads it."""
        used = self.used
        for i in reversed(range(len(self.operations))):
            for value in self.operations[i].results:
                used[value] = max(map(self.computed_at, self.readers[value]), default=i)
        ends = {value: self.maker[value] for value in self.materialized}
        for value, i in used.items():
            if value not in self.materialized:
                for source in self.sources(value):
                    ends[source] = max(ends[source], i)
        for i, operation in enumerate(self.operations):
            for source in self.read_by(operation):
                ends[source] = max(ends[source], self.computed_at(i))
        for value in self.results:
            ends |= dict.fromkeys(self.sources(value), len(self.operations))
        return ends

    def computed_at(self, i: int) -> int:
        """Place of an operation in the program: its own, or that of what it is fused into.

        What is written over an argument is computed as soon as all that it reads is there, such as
        a weight, before the update of the next one.
        """
        operation = self.operations[i]
        if operation.results and operation.results[0] not in self.materialized:
            return self.used[operation.results[0]]
        if self.is_written_over(operation):
            makers = [self.maker[source] for source in self.read_by(operation)]
            return max(map(self.computed_at, makers), default=i)
        return i

    def is_written_over(self, operation: Operation) -> bool:
        """Return True if a result is computed by element of an argument, whose buffer it takes."""
        if operation.kind is not Kind.ELEMENTWISE or operation.results[0] not in self.results:
            return False
        shape = self.shape(operation.results[0])
        return any(
            self.uncast(value) in self.inputs and self.shape(value) == shape
            for value in operation.reads
        )

    def read_by(self, operation: Operation) -> frozenset[int]:
        """The buffers that an operation reads."""
        return frozenset[int]().union(*map(self.sources, operation.reads))

    def is_materialized(self, value: int) -> bool:
        i = self.maker[value]
        if self.is_alias(i) or self.is_update_of_argument(i) or self.is_sunk(value):
            return False
        if self.is_slice(i) and not self.is_mask(value):
            return True  # at once, as that frees the rest
        if self.compiler.has_random_kernel and self.is_random_word(value):
            return True
        if self.is_fused(i) and self.operations[i].kind not in _REDUCED:
            return self.is_read_from_memory(value) or (
                self.compiler.materializes_shared and self.is_shared(value)
            )
        return not self.is_fused_into_sum(i)

    def is_update_of_argument(self, i: int) -> bool:
        """Return True if a part of an argument is written anew, which is donated: in its buffer."""
        operation = self.operations[i]
        if operation.name != "dynamic_update_slice":
            return False
        target = operation.arguments[0]
        return target is not None and self.uncast(target) in self.inputs

    def is_mask(self, value: int) -> bool:
        """Return True if a value is of booleans, which are computed where they are read."""
        return str(self.variables[value].aval.dtype) == "bool"

    def is_random_word(self, value: int) -> bool:
        """Return True if a value is hashed bits, of which a mask is made by comparison."""
        is_word = str(self.variables[value].aval.dtype) == "uint32"
        return is_word and any(self.operations[j].name == "lt" for j in self.readers[value])

    def is_shared(self, value: int) -> bool:
        """Return True if several operations read a value, so that it is fused into none of them."""
        maker = self.operations[self.maker[value]].primitive
        return len(self.readers[value]) > 1 and not maker.is_cheap

    def is_fused(self, i: int) -> bool:
        kind = self.operations[i].kind
        if kind is Kind.RANDOM and self.compiler.has_random_kernel:
            return False
        return kind in _FUSED | _REDUCED or self.is_slice(i)

    def is_alias(self, i: int) -> bool:
        operation = self.operations[i]
        if operation.kind is Kind.RESHARD and operation.reads:
            is_same = self.shape(operation.reads[0]) == self.shape(operation.results[0])
            return is_same or self.is_own_rows(i) or self.is_looked_up(i)
        if operation.kind is Kind.REDUCTION and self.compiler.sums_devices_at_once:
            # Over devices alone, each of which has one element of it.
            return self.size(operation.reads[0]) == self.size(operation.results[0])
        if self.is_strided(i):
            return True
        return operation.kind in (Kind.ALIAS, Kind.RESIDUAL) and not self.is_merged(i)

    def is_strided(self, i: int) -> bool:
        """Return True if a loop reads slices of a value, whose outer axes alone are transposed.

        As microbatches, of every so many rows: slices are cut out of the rows as they lie. The two
        innermost axes are those of a TPU's tiles, which stay.
        """
        operation = self.operations[i]
        if operation.name != "transpose" or self.compiler.lanes is None:
            return False
        order: Any = operation.equation.params["permutation"]
        readers = [self.operations[j] for j in self.readers[operation.results[0]]]
        is_outer = order[-2:] == tuple(range(len(order)))[-2:]
        return (
            is_outer
            and bool(readers)
            and all(scan.is_sliced(operation.results[0], reader) for reader in readers)
        )

    def is_merged(self, i: int) -> bool:
        """Return True if a narrow axis is merged into matrices for a grouped matmul: a copy.

        The kernel takes them row by row, and no array lies with an axis of 2 innermost.
        """
        operation, lanes = self.operations[i], self.compiler.lanes
        if lanes is None or operation.name != "reshape":
            return False
        (value,) = operation.results
        width = self.shape(operation.reads[0])[-1:]
        is_narrow = width != self.shape(value)[-1:] and width != () and width[0] < lanes
        return is_narrow and any(
            self.operations[j].name == GROUPED and value in self.operations[j].arguments[1:2]
            for j in self.readers[value]
        )

    def is_sunk(self, value: int) -> bool:
        """Return True if a value is one number everywhere, which a loop makes where it is read."""
        readers = [self.operations[j] for j in self.readers[value]]
        is_constant = bool(readers) and all(scan.is_constant(value, one) for one in readers)
        return is_constant and self.compiler.lanes is not None and self.is_uniform(value)

    def is_uniform(self, value: int) -> bool:
        """Return True if a value is one number, broadcast."""
        if self.size(value) == 1:
            return True
        operation = self.operations[self.maker[value]] if value in self.maker else None
        if operation is None or operation.name not in ("broadcast_in_dim", "pvary", "reshape"):
            return False
        return all(map(self.is_uniform, operation.reads))

    def is_slice(self, i: int) -> bool:
        """Return True if each device keeps only its slice, as a reduce-scatter gives at once."""
        operation = self.operations[i]
        if operation.kind is not Kind.RESHARD or not operation.reads or self.is_own_rows(i):
            return False
        return self.size(operation.reads[0]) > self.size(operation.results[0])

    def is_own_rows(self, i: int) -> bool:
        """Return True if devices keep rows of a scattered sum: each adds to its own rows alone.

        So the gradient of embeddings whose vocabulary is split is never whole on a device.
        """
        return self.operations[i].reads[0] in self.scattered_rows

    def is_looked_up(self, i: int) -> bool:
        """Return True if rows of devices are gathered to be indexed: each looks up its own instead.

        What it does not have is zero, and the sum over devices is small.
        """
        operation = self.operations[i]
        (read, *_), (value,) = operation.reads, operation.results
        split = set(self.changed_axes(read, value))
        readers = [self.operations[j] for j in self.readers[value]]
        if self.compiler.lanes is None or self.size(read) >= self.size(value) or not readers:
            return False
        return all(
            reader.name == "gather"
            and reader.arguments[0] == value
            and split <= set(reader.equation.params["dimension_numbers"].start_index_map)
            for reader in readers
        )

    @cached_property
    def scattered_rows(self) -> dict[int, int]:
        """Scattered sums of which devices keep only rows, with what they add to, and these."""
        found = {}
        for operation in self.operations:
            if operation.name != "scatter-add" or self.compiler.lanes is None:
                continue
            whole = [*operation.results, *self.unmoved(operation.arguments[0])]
            while (after := self.resharded(whole[0])) is not None and self.is_unmoved(after):
                whole.insert(0, after)
            numbers: Any = operation.equation.params["dimension_numbers"]
            rows = set(numbers.scatter_dims_to_operand_dims)
            if after is not None and set(self.changed_axes(whole[0], after)) <= rows:
                found |= dict.fromkeys(whole, after)
        return found

    def resharded(self, value: int) -> int | None:
        """A value in the only other layout that anything reads it in."""
        readers = [self.operations[j] for j in self.readers[value]]
        if len(readers) == 1 and readers[0].kind is Kind.RESHARD:
            return readers[0].results[0]
        return None

    def unmoved(self, value: int | None) -> Iterator[int]:
        """A value and those that it is, before reshards that change nothing."""
        while value is not None:
            yield value
            is_same = value in self.maker and self.is_unmoved(value)
            value = self.operations[self.maker[value]].reads[0] if is_same else None

    def is_unmoved(self, value: int) -> bool:
        operation = self.operations[self.maker[value]]
        if operation.kind is not Kind.RESHARD or not operation.reads:
            return False
        return not self.changed_axes(operation.reads[0], value)

    def changed_axes(self, before: int, after: int) -> list[int]:
        """Axes of `after` of which a device has another share than of those of `before`.

        In front, what enters a loop of one round or leaves it has the axis of rounds as well.
        """
        old, new = self.shape(before), self.shape(after)
        own = min(len(old), len(new))
        first = len(new) - own
        pairs = zip(old[len(old) - own :], new[first:], strict=True)
        return [first + axis for axis, (one, other) in enumerate(pairs) if one != other]

    def uncast(self, value: int) -> int:
        """The value that was cast to this one."""
        i = self.maker.get(value)
        while i is not None and self.is_cast(i) and self.operations[i].reads:
            value = self.operations[i].reads[0]
            i = self.maker.get(value)
        return value

    def is_cast(self, i: int) -> bool:
        return self.is_alias(i) or self.operations[i].name == "convert_element_type"

    def is_fused_into_sum(self, i: int) -> bool:
        """Return True if a matmul is only read by a sum or a cast, which is its epilogue.

        A grouped matmul is a kernel by itself, which writes what it computes, and sums of which
        devices have parts are all-reduced first.
        """
        operation = self.operations[i]
        if operation.kind not in _CONTRACTED or not self.compiler.fuses_epilogues:
            return False
        if operation.name == GROUPED or _is_partial(operation):
            return False
        (value,) = operation.results
        readers = [self.operations[j].name for j in self.readers[value]]
        is_epilogue = readers in (["add"], ["add_any"], ["convert_element_type"])
        return is_epilogue and value not in self.results

    def is_read_from_memory(self, value: int) -> bool:
        """Return True if an unfused operation reads the value."""
        if value not in self.read_from_memory:
            is_kept = value in self.results or value in self.residuals
            self.read_from_memory[value] = is_kept or any(
                any(map(self.is_read_from_memory, self.operations[i].aliases(value)))
                if self.is_alias(i)
                else not self.is_fused(i)
                for i in self.readers[value]
            )
        return self.read_from_memory[value]

    def sources(self, value: int) -> frozenset[int]:
        """The buffers that a value is computed from: itself, if it is one."""
        if value not in self.known_sources:
            if value in self.inputs or value not in self.maker:
                sources = frozenset[int]()
            elif value in self.materialized:
                sources = frozenset([value])
            else:
                reads = self.operations[self.maker[value]].sources(value)
                sources = frozenset[int]().union(*map(self.sources, reads))
            self.known_sources[value] = sources
        return self.known_sources[value]

    def size(self, value: int) -> int:
        return math.prod(self.shape(value))

    def shape(self, value: int) -> tuple[int, ...]:
        return device_shape(self.variables[value])

    def bytes_of(self, value: int) -> int:
        return self.bytes_in(self.variables[self.scattered_rows.get(value, value)])

    def buffer(self, value: int, size: int) -> Buffer:
        i, of = self.maker.get(value), self.variables[value].aval
        maker = "parameter" if i is None else self.operations[i].name
        return Buffer(self.shape(value), of.shape, str(of.dtype), size, maker)


def _is_partial(operation: Operation) -> bool:
    """Return True if a device adds only a part of what is contracted in a matmul."""
    own, whole = (contraction(operation.equation, of).k for of in (device_shape, shape))
    return own < whole


def _overwritten(operation: Operation, value: int) -> int | None:
    """The argument of a kernel in whose buffer it writes a result, by its declaration."""
    written: Any = operation.equation.params.get("aliases", ())
    places = {result: argument for argument, result in written}
    i = operation.results.index(value)
    return operation.arguments[places[i]] if i in places else None


def _itemsize(variable: Any) -> int:
    return getattr(variable.aval.dtype, "itemsize", 4)
