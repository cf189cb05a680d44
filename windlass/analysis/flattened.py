"""Flattened jaxpr: a list of operations, with calls inlined."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from windlass.analysis.per_device import device_shape
from windlass.analysis.primitives import (
    Kind,
    Primitive,
    has_own_derivative,
    primitive,
    sub_jaxprs,
)
from windlass.layers.pattern import Pattern
from windlass.networks.experts import dispatch


class Scope(NamedTuple):
    """The calls that an operation was inlined from."""

    names: tuple[str, ...] = ()
    devices: int = 1  # that each do it, where shapes are those of one: inside of a shard_map
    has_own_derivative: bool = False

    @property
    def share(self) -> float:
        """The share of rows that a device computes, of those it has room for: of its experts."""
        return math.prod(map(dispatch.share, self.names))


class Operation(NamedTuple):
    """One operation; values are numbers, in the order in which they are made."""

    name: str  # of the primitive, or of attention
    arguments: list[int | None]  # None: a literal
    results: list[int]
    equation: JaxprEqn
    scope: Scope
    is_round_trip: bool = False  # a cast back to the narrower dtype that its argument had

    @property
    def reads(self) -> list[int]:
        return [value for value in self.arguments if value is not None]

    def sources(self, result: int) -> list[int]:
        """Values that a result is made of: of several at once, as of a barrier, its own."""
        if self.kind is not Kind.ALIAS or len(self.results) == 1:
            return self.reads
        own = self.arguments[self.results.index(result)]
        return [] if own is None else [own]

    def aliases(self, value: int) -> list[int]:
        """Results that are a value under another name."""
        if len(self.results) == 1:
            return self.results
        pairs = zip(self.arguments, self.results, strict=True)
        return [result for argument, result in pairs if argument == value]

    @property
    def primitive(self) -> Primitive:
        return primitive(self.equation)

    @property
    def kind(self) -> Kind:
        if self.is_round_trip:
            return Kind.ALIAS
        return Kind.KERNEL if self.attention else self.primitive.kind

    @property
    def attention(self) -> Pattern | None:
        return Pattern.of(self.name)


class Flattened:
    """The operations of a jaxpr, and the variable behind every value.

    `keeps_attention`: as one operation, also where a compiler sees into it. `keeps_casts`: also
    those that only undo another.
    """

    def __init__(self, program: Jaxpr, *, keeps_attention: bool = False, keeps_casts: bool = False):
        self.keeps_attention = keeps_attention
        self.operations: list[Operation] = []
        self.variables: list[Any] = []
        # Arguments of what is computed a second time, which a barrier keeps from being merged.
        self.residuals: set[int] = set()
        self.inputs = [self._value(variable) for variable in program.invars]
        self.outputs = self._inline(program, self.inputs, Scope())
        if not keeps_casts:
            self._skip_round_trips()

    def _value(self, variable: Any) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    def _inline(
        self, program: Jaxpr, inputs: Sequence[int | None], scope: Scope
    ) -> list[int | None]:
        known: dict[Any, int | None] = dict(zip(program.invars, inputs, strict=True))
        known |= {variable: self._value(variable) for variable in program.constvars}

        def number(variable: Any) -> int | None:
            return None if isinstance(variable, Literal) else known[variable]

        for equation in program.eqns:
            arguments = [number(variable) for variable in equation.invars]
            results = self._results(equation, arguments, scope)
            known.update(zip(equation.outvars, results, strict=True))
        return [number(variable) for variable in program.outvars]

    def _results(
        self, equation: JaxprEqn, arguments: list[int | None], scope: Scope
    ) -> Sequence[int | None]:
        if self._is_inlined(equation):
            (body,) = sub_jaxprs(equation)
            if _is_computed_again(equation):
                self.residuals.update(value for value in arguments if value is not None)
            return self._inline(body, arguments, _inside(scope, equation))
        results = [self._value(variable) for variable in equation.outvars]
        operation = Operation(_name(equation), arguments, results, equation, scope)
        self.operations.append(operation)
        return results

    def _skip_round_trips(self) -> None:
        """Let casts back to a narrower dtype read what was cast from it, as compilers do."""
        origins: dict[int, int] = {}  # of numbers in a wider one
        for i, operation in enumerate(self.operations):
            if len(operation.reads) != 1 or len(operation.results) != 1:
                continue
            (read,), (value,) = operation.reads, operation.results
            origin = origins.get(read)
            if operation.name != "convert_element_type":
                if origin is not None and self._is_same(operation):
                    origins[value] = origin
            elif origin is not None and self._dtype(origin) == self._dtype(value):
                self.operations[i] = operation._replace(arguments=[origin], is_round_trip=True)
            elif self._itemsize(read) < self._itemsize(value):
                origins[value] = read

    def _is_same(self, operation: Operation) -> bool:
        """Return True if a result is its argument under another name or in another shape."""
        shapes = (device_shape(self.variables[i]) for i in (*operation.reads, *operation.results))
        before, after = map(math.prod, shapes)
        return operation.kind in (Kind.ALIAS, Kind.RESHARD) and before == after

    def _dtype(self, value: int) -> Any:
        return self.variables[value].aval.dtype

    def _itemsize(self, value: int) -> int:
        return getattr(self._dtype(value), "itemsize", 0)

    def _is_inlined(self, equation: JaxprEqn) -> bool:
        """Return True if a compiler puts the body of an equation in its place."""
        kind, bodies = primitive(equation).kind, list(sub_jaxprs(equation))
        if len(bodies) != 1 or len(bodies[0].invars) != len(equation.invars):
            return False
        if kind is Kind.LOOP:  # of one round it is none
            return equation.params.get("length") == 1
        # Attention without matmuls is only sketched: it is a kernel of its own.
        is_kernel = self.keeps_attention or not _has_matmuls(bodies[0])
        return kind is Kind.CALL and not (is_kernel and _is_attention(equation))


def _inside(scope: Scope, equation: JaxprEqn) -> Scope:
    return Scope(
        (*scope.names, str(equation.params.get("name") or equation.primitive.name)),
        scope.devices * _manual_devices(equation),
        scope.has_own_derivative or has_own_derivative(equation),
    )


def _manual_devices(equation: JaxprEqn) -> int:
    """The devices among which a shard_map divides its arguments."""
    params = equation.params
    if equation.primitive.name != "shard_map":
        return 1
    name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
    return math.prod(params["mesh"].shape[axis] for axis in params[name])


def _is_computed_again(equation: JaxprEqn) -> bool:
    """Return True for the part of a checkpointed function that its backward pass computes."""
    return bool(equation.params.get("differentiated") and equation.params.get("prevent_cse"))


def _has_matmuls(program: Jaxpr) -> bool:
    kinds = {primitive(equation).kind for equation in _all(program)}
    return not kinds.isdisjoint((Kind.MATMUL, Kind.CONVOLUTION))


def _all(program: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in program.eqns:
        yield equation
        for body in sub_jaxprs(equation):
            yield from _all(body)


def _is_attention(equation: JaxprEqn) -> bool:
    """Return True if an equation is a pass of attention, forward or backward.

    JAX cuts what has the name in pieces: around the backward pass is a call of the forward name,
    and a mask is taken out of a loop without the queries.
    """
    named = Pattern.of(str(equation.params.get("name"))) is not None
    return named and _has_queries(equation) and not any(map(_is_attention, _inside_of(equation)))


def _has_queries(equation: JaxprEqn) -> bool:
    queries: Any = equation.invars[0].aval
    return bool(equation.outvars) and queries.ndim == 4


def _inside_of(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    return itertools.chain.from_iterable(map(_all, sub_jaxprs(equation)))


def _name(equation: JaxprEqn) -> str:
    return equation.params["name"] if _is_attention(equation) else equation.primitive.name
