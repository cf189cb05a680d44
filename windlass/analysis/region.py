"""A region of a program: the per-device work of its flattened operations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from windlass.analysis import per_device
from windlass.analysis.flattened import Flattened, Operation
from windlass.analysis.fusion import Amount, Node, Value
from windlass.analysis.primitives import (
    Kind,
    constants_and_carry,
    contraction,
    primitive,
    sub_jaxprs,
)
from windlass.analysis.work import KERNELS, AttentionCall, Collective, Matmul
from windlass.devices.triton import SKETCHED
from windlass.layers.pattern import Pattern
from windlass.program.step import MICROBATCH


class Region:
    """The operations of a program that runs `times` over, but for those in bodies of loops."""

    def __init__(
        self,
        program: Jaxpr,
        inputs: Sequence[Value],
        part: str,
        *,
        times: Amount,
        vocab: int | None,
        fuses_epilogues: bool,
        inner: Callable,
    ):
        self.part, self.times, self.vocab = part, times, vocab
        # What only gives an array another name is then a part of the matmul that wrote it.
        self.fuses_epilogues = fuses_epilogues
        self.inner = inner  # reads the body of a loop, as a region of its own
        self.nodes: list[Node] = []
        self.flattened = Flattened(program, keeps_casts=fuses_epilogues)
        self.values = dict(zip(self.flattened.inputs, inputs, strict=True))
        for operation in self.flattened.operations:
            reads = [self.value(number) for number in operation.arguments]
            writes = self.follow(operation, reads, self.part_of(operation))
            self.values.update(zip(operation.results, writes, strict=True))
        self.outputs = [self.value(number) for number in self.flattened.outputs]

    def value(self, number: int | None) -> Value:
        if number is None:
            return Value(0, 4)
        if number not in self.values:  # a constant of the program
            self.values[number] = per_device.value(self.flattened.variables[number])
        return self.values[number]

    def part_of(self, operation: Operation) -> str:
        """Part of the step: what comes after its microbatches is the optimiser."""
        is_before = not {MICROBATCH, "scan"}.isdisjoint(operation.scope.names)
        return "elementwise" if self.part == "optimiser" and is_before else self.part

    def follow(self, operation: Operation, reads: list[Value], part: str) -> list[Value]:
        equation = operation.equation
        match operation.kind:
            case Kind.ALIAS | Kind.TRANSPOSE:
                return reads[: len(operation.results)]
            case Kind.RESIDUAL if not self.fuses_epilogues:
                return reads
            case Kind.LOOP:
                return self.loop(equation, reads, part)
            case Kind.MATMUL:
                return self.matmul(equation, reads, part, operation.scope.share)
            case Kind.CONVOLUTION:
                return self.convolution(equation, reads, part)
            case Kind.RESHARD:
                return self.reshard(equation, reads, part)
            case Kind.COLLECTIVE:
                return self.collective(equation, reads, part)
            case Kind.KERNEL if operation.attention is not None:
                call = self.attention(equation, operation.attention)
                return self.add(equation, reads, part, is_unfused=True, record=call, is_matmul=True)
            case Kind.UPDATE:
                return self.update(equation, reads, part)
            case Kind.KERNEL if equation.params.get("matmul") is not None:
                return self.kernel_matmul(equation, reads, part)
            case Kind.KERNEL if part == "elementwise" and operation.name == SKETCHED.name:
                return self.unfused(equation, reads, KERNELS)
            case Kind.KERNEL | Kind.CUMULATIVE | Kind.OPAQUE | Kind.CALL:
                return self.unfused(equation, reads, part)
        is_reduced = operation.kind is Kind.REDUCTION
        return self.add(
            equation,
            reads,
            part,
            is_reduced=is_reduced,
            is_slice=operation.kind is Kind.INDEXING,
            is_scaling=operation.primitive.is_scaling,
            operations=_operations(equation, reads),
            partial_axes=_over(equation) if is_reduced else (),
        )

    def add(self, equation: JaxprEqn, reads: list[Value], part: str, **about: Any) -> list[Value]:
        writes = [per_device.value(variable) for variable in equation.outvars]
        for variable, result in zip(equation.outvars, writes, strict=True):
            if per_device.is_automatic(variable) and (ways := _ways(equation, reads)) > 1:
                result.elements /= ways
                result.axes = max((value.axes for value in reads), key=len)
        if part == "elementwise" and self.has_vocab_axis(equation.outvars):
            part = "head"
        is_auto = any(map(per_device.is_automatic, equation.outvars))
        node = Node(equation.primitive.name, reads, writes, part, is_auto=is_auto, **about)
        self.nodes.append(node)
        return writes

    def has_vocab_axis(self, variables: Sequence[Any]) -> bool:
        return any(
            per_device.has_vocab_axis(per_device.shape(one), self.vocab) for one in variables
        )

    def attention(self, equation: JaxprEqn, pattern: Pattern) -> AttentionCall:
        """A flash kernel, which the program only sketches."""
        shapes = [per_device.shape(variable) for variable in equation.invars]
        heads = [shape for shape in shapes if len(shape) == 4]
        batch, length, most, dim = max(heads, key=lambda shape: shape[2])
        return AttentionCall(
            batch,
            length,
            min(shape[1] for shape in heads),
            most,
            min(shape[2] for shape in heads),
            dim,
            pattern,
            per_device.dtype(equation.invars[0]),
            self.times,
        )

    def convolution(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        shape = contraction(equation, per_device.device_shape)
        if not shape.is_depthwise:
            return self.matmul(equation, reads, part)
        # By vector units, for which a multiplication and a sum are one operation.
        return self.unfused(equation, reads, part, operations=shape.flops / 2)

    def matmul(
        self, equation: JaxprEqn, reads: list[Value], part: str, share: float = 1.0
    ) -> list[Value]:
        m, n, k, batch, contracted = contraction(equation, per_device.device_shape)
        result = per_device.value(equation.outvars[0])
        dtype = per_device.dtype(max(equation.invars[:2], key=per_device.itemsize))
        here = {"elementwise": "matmuls"}.get(part, part)
        if here == "matmuls" and self.has_vocab_axis([*equation.invars, *equation.outvars]):
            here = "head"
        moved = reads[0].bytes + reads[1].bytes + result.bytes
        precision = equation.params.get("precision")
        is_rounded = precision in (None, (jax.lax.Precision.DEFAULT,) * 2)
        record = Matmul(m, n, k, batch, dtype, moved, self.times * share, here, is_rounded)
        partial_axes = per_device.axes_at(equation.invars[0], contracted)
        about = dict(is_unfused=True, is_matmul=True, record=record, partial_axes=partial_axes)
        return self.add(equation, reads, part, **about)

    def kernel_matmul(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        """A kernel that declares the matmul it computes."""
        m, n, k = equation.params["matmul"]
        (result,) = map(per_device.value, equation.outvars)
        moved = sum(value.bytes for value in (*reads, result))
        here = {"elementwise": "matmuls"}.get(part, part)
        dtype = per_device.dtype(equation.invars[0])
        record = Matmul(m, n, k, 1, dtype, moved, self.times, here)
        return self.add(equation, reads, part, is_unfused=True, is_matmul=True, record=record)

    def reshard(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        if _enters(equation):
            return reads
        before, after = (
            per_device.axes(equation.invars[0]) or reads[0].axes,
            per_device.axes(equation.outvars[0]),
        )
        gathered = tuple(sorted(before - after))
        if not gathered and not self.fuses_epilogues and _is_unmoved(equation):
            return reads
        if not gathered:
            return self.add(equation, reads, part, is_slice=True)
        moved = per_device.value(equation.outvars[0]).bytes
        record = Collective("all-gather", gathered, moved, self.times, part)
        return self.add(equation, reads, part, is_unfused=True, record=record)

    def collective(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        names = equation.params.get("axes") or equation.params.get("axis_name") or ()
        axes = tuple(names) if isinstance(names, tuple | list) else (names,)
        whole = max(
            sum(v.bytes for v in reads), sum(per_device.value(v).bytes for v in equation.outvars)
        )
        kind = primitive(equation).collective
        assert kind is not None
        record = Collective(kind, axes, whole, self.times, part)
        return self.add(equation, reads, part, is_unfused=True, record=record)

    def update(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        # The update is read, and the slice that it goes to is read and written.
        added = reads[1] if equation.primitive.name == "dynamic_update_slice" else reads[2]
        is_automatic = per_device.is_automatic(equation.outvars[0])
        partial_axes = tuple(sorted(added.axes)) if is_automatic else ()
        about = dict(is_unfused=True, own=3 * added.bytes, partial_axes=partial_axes)
        return self.add(equation, reads, part, **about)

    def unfused(
        self, equation: JaxprEqn, reads: list[Value], part: str, operations: Amount = 0.0
    ) -> list[Value]:
        writes = map(per_device.value, equation.outvars)
        own = sum(value.bytes for value in (*reads, *writes))
        return self.add(equation, reads, part, is_unfused=True, own=own, operations=operations)

    def loop(self, equation: JaxprEqn, reads: list[Value], part: str) -> list[Value]:
        if equation.primitive.name != "scan":  # of unknown length, or branches
            body = max(sub_jaxprs(equation), key=lambda body: len(body.eqns))
            inside = [per_device.value(variable) for variable in body.invars]
            is_round = equation.primitive.name == "while"
            self.inner(body, inside, self.times, part, is_round=is_round)
            return self.add(equation, reads, part, is_unfused=True)
        (body,) = sub_jaxprs(equation)
        constants, carried = constants_and_carry(body, equation)
        inner = "elementwise" if part == "optimiser" else part
        self.inner(
            body,
            [per_device.value(variable) for variable in body.invars],
            self.times * equation.params["length"],
            inner,
            is_round=True,
            sliced=range(constants + carried, len(body.invars)),
            stacked=range(carried, len(body.outvars)),
        )
        return self.add(equation, reads, inner, is_unfused=True)


def _operations(equation: JaxprEqn, reads: list[Value]) -> Amount:
    """Operations of vector units, in sums that would take as long."""
    row = primitive(equation)
    elements = max((math.prod(per_device.device_shape(v)) for v in equation.outvars), default=0)
    if row.kind is Kind.REDUCTION:
        elements = max((value.elements for value in reads), default=0)
    return float(elements * row.operations)


def _over(equation: JaxprEqn) -> tuple[str, ...]:
    return per_device.axes_at(equation.invars[0], equation.params["axes"])


def _enters(equation: JaxprEqn) -> bool:
    """Return True if a reshard only leaves the sharding of an array to the compiler."""
    return per_device.is_automatic(equation.outvars[0]) and not per_device.is_automatic(
        equation.invars[0]
    )


def _is_unmoved(equation: JaxprEqn) -> bool:
    """Return True if each device has as much of an array after a reshard as before."""
    (read, *_), (written,) = equation.invars, equation.outvars
    return per_device.device_shape(read) == per_device.device_shape(written)


def _ways(equation: JaxprEqn, reads: list[Value]) -> Amount:
    """Devices that the compiler shards a result over: as its arguments are."""
    if equation.primitive.name.startswith("scatter"):
        return 1.0
    pairs = zip(equation.invars, reads, strict=True)
    return max(
        (math.prod(per_device.shape(v)) / x.elements for v, x in pairs if x.elements), default=1.0
    )
