"""Flattened jaxpr: a list of operations, with calls inlined."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

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

    @property
    def reads(self) -> list[int]:
        return [value for value in self.arguments if value is not None]

    @property
    def primitive(self) -> Primitive:
        return primitive(self.equation)

    @property
    def kind(self) -> Kind:
        return Kind.KERNEL if self.attention else self.primitive.kind

    @property
    def attention(self) -> Pattern | None:
        return Pattern.of(self.name)


class Flattened:
    """The operations of a jaxpr, and the variable behind every value.

    `keeps_attention`: as one operation, also where a compiler sees into it.
    """

    def __init__(self, program: Jaxpr, *, keeps_attention: bool = False):
        self.keeps_attention = keeps_attention
        self.operations: list[Operation] = []
        self.variables: list[Any] = []
        self.inputs = [self._value(variable) for variable in program.invars]
        self.outputs = self._inline(program, self.inputs, Scope())

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
            return self._inline(body, arguments, _inside(scope, equation))
        results = [self._value(variable) for variable in equation.outvars]
        operation = Operation(_name(equation), arguments, results, equation, scope)
        self.operations.append(operation)
        return results

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
