"""A program as operations in a row: what it calls stands in the place of the calls."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from windlass.analysis.flops import programs
from windlass.layers.pattern import Pattern

_CALLS = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr shard_map".split()
)


class Operation(NamedTuple):
    """One operation; values are numbers, in the order in which they are made."""

    name: str  # of the primitive, or of attention
    arguments: list[int | None]  # None: a number in the program itself
    writes: list[int]
    equation: JaxprEqn

    @property
    def reads(self) -> list[int]:
        return [value for value in self.arguments if value is not None]


class Straight:
    """The operations of a program, and the variable behind every value."""

    def __init__(self, program: Jaxpr):
        self.operations: list[Operation] = []
        self.variables: list[Any] = []
        self.inputs = [self._value(variable) for variable in program.invars]
        self.outputs = [out for out in self._follow(program, self.inputs) if out is not None]

    def _value(self, variable: Any) -> int:
        self.variables.append(variable)
        return len(self.variables) - 1

    def _follow(self, program: Jaxpr, inputs: Sequence[int | None]) -> list[int | None]:
        known: dict[Any, int | None] = dict(zip(program.invars, inputs, strict=True))
        known |= {variable: self._value(variable) for variable in program.constvars}

        def number(variable: Any) -> int | None:
            return None if isinstance(variable, Literal) else known[variable]

        for equation in program.eqns:
            reads = [number(variable) for variable in equation.invars]
            writes = self._called(equation, reads)
            if writes is None:
                writes = [self._value(variable) for variable in equation.outvars]
                made = Operation(_name(equation), reads, [*writes], equation)
                self.operations.append(made)
            known.update(zip(equation.outvars, writes, strict=True))
        return [number(variable) for variable in program.outvars]

    def _called(self, equation: JaxprEqn, reads: list[int | None]) -> list[int | None] | None:
        """What a call gives, or None where the equation is an operation of its own."""
        name, bodies = equation.primitive.name, list(programs(equation.params))
        if len(bodies) != 1 or len(bodies[0].invars) != len(reads):
            return None
        # A loop of one round is none to a compiler. Attention without products is only sketched:
        # it is a kernel of its own.
        is_once = name == "scan" and equation.params["length"] == 1
        is_kernel = Pattern.of(_name(equation)) is not None and not _has_products(bodies[0])
        is_called = name in _CALLS and not is_kernel
        return self._follow(bodies[0], reads) if is_once or is_called else None


def _has_products(program: Jaxpr) -> bool:
    return any(
        equation.primitive.name == "dot_general"
        or any(_has_products(body) for body in programs(equation.params))
        for equation in program.eqns
    )


def _name(equation: JaxprEqn) -> str:
    called = equation.params.get("name")
    if isinstance(called, str) and Pattern.of(called) is not None:
        return called
    return equation.primitive.name
