"""Model FLOPs: what a call and its gradient need, counted in its jaxpr and not run.

Counted are matmuls and convolutions, once for every time they are used: a map that a scan applies
42 times counts 42 times. All else is small beside them. A loop whose length is not known before it
runs counts as one round. What rematerialisation computes again is no work of the model's.

For y = a b the gradient takes as much again for each of da = dy bᵀ and db = aᵀ dy that is needed.
Which are is found by activity analysis: a value is *varied* if it depends on what is trained, and
*useful* if the loss depends on it, both through derivatives; da is needed if a is varied and y is
useful. So a frozen matrix has no gradient of its own, and what is behind a `stop_gradient` none.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import PyTree

from windlass.analysis.flattened import Flattened, Operation
from windlass.analysis.primitives import (
    Kind,
    constants_and_carry,
    contraction,
    shape,
    sub_jaxprs,
)
from windlass.devices.sketch import sketched
from windlass.layers.pattern import Pattern
from windlass.program.programs import Programs
from windlass.program.step import Frozen, State

Flags = Sequence[bool]
Values = set[int | None]


def step_flops(programs: Programs, state: State, frozen: Frozen, stage: int = -1) -> int:
    """FLOPs of an optimiser step, of shapes: of its training call on each of the microbatches."""
    with sketched():
        call, arguments = programs.training_call(state, frozen, stage)
        return programs.batches.accumulation * training_flops(call, *arguments)


def training_flops(function: Callable, weights: PyTree, *others: Any) -> int:
    """FLOPs of a call, and of the gradient of its first result by `weights`, its first argument.

    On all devices together; arguments may be shapes without values.
    """
    whole, _, _ = eqx.filter_make_jaxpr(function)(weights, *others)
    results = len(whole.jaxpr.outvars)
    program, _ = dce_jaxpr(whole.jaxpr, [True] * results, instantiate=True)
    trained = len(jax.tree.leaves(eqx.filter(weights, _is_array)))
    varied = [i < trained for i in range(len(program.invars))]
    return _Body(program).flops(varied, [i == 0 for i in range(results)])


class _Body:
    """Activity analysis of a jaxpr: forwards what is varied, backwards what is useful."""

    def __init__(self, program: Jaxpr):
        self.flattened = Flattened(program, keeps_attention=True)
        self.operations = [_active(operation) for operation in self.flattened.operations]

    def flops(self, varied: Flags, useful: Flags) -> int:
        is_varied, is_useful = self._forwards(varied), self._backwards(useful)
        return sum(
            one.operation.scope.devices
            * one.flops(one.flags(one.arguments, is_varied), one.flags(one.results, is_useful))
            for one in self.operations
        )

    @property
    def forward_flops(self) -> int:
        arguments, results = len(self.flattened.inputs), len(self.flattened.outputs)
        return self.flops([False] * arguments, [False] * results)

    def varied(self, arguments: Flags) -> list[bool]:
        """Varied results, given the arguments."""
        varied = self._forwards(arguments)
        return [value in varied for value in self.flattened.outputs]

    def useful(self, results: Flags) -> list[bool]:
        """Useful arguments, given the results."""
        useful = self._backwards(results)
        return [value in useful for value in self.flattened.inputs]

    def _forwards(self, arguments: Flags) -> Values:
        known = _flagged(self.flattened.inputs, arguments)
        for one in self.operations:
            known |= _flagged(one.results, one.varied(one.flags(one.arguments, known)))
        return known

    def _backwards(self, results: Flags) -> Values:
        known = _flagged(self.flattened.outputs, results)
        for one in reversed(self.operations):
            known |= _flagged(one.arguments, one.useful(one.flags(one.results, known)))
        return known


def _flagged(values: Sequence[int | None], flags: Flags) -> Values:
    return {value for value, is_so in zip(values, flags, strict=True) if is_so} - {None}


class _Active:
    """An operation whose results all have derivatives by all of its arguments, or none."""

    def __init__(self, operation: Operation):
        self.operation, self.equation = operation, operation.equation
        self.arguments, self.results = operation.arguments, operation.results
        self.variables = dict(zip(self.arguments, self.equation.invars, strict=True))
        self.variables |= dict(zip(self.results, self.equation.outvars, strict=True))
        self.bodies = [_Body(body) for body in sub_jaxprs(self.equation)]
        # A function with a derivative of its own may give one to all that it computes.
        self.is_free = operation.scope.has_own_derivative
        self.is_cut = not (operation.primitive.has_derivative or self.is_free)

    def flags(self, values: Sequence[int | None], known: Values) -> list[bool]:
        return [value in known and self._is_differentiable(value) for value in values]

    def _is_differentiable(self, value: int | None) -> bool:
        shape: Any = self.variables[value].aval
        return self.is_free or jnp.issubdtype(shape.dtype, jnp.inexact)

    def varied(self, arguments: Flags) -> list[bool]:
        return [any(arguments) and not self.is_cut] * len(self.results)

    def useful(self, results: Flags) -> list[bool]:
        return [any(results) and not self.is_cut] * len(self.arguments)

    def flops(self, varied: Flags, useful: Flags) -> int:
        if self.operation.kind in (Kind.MATMUL, Kind.CONVOLUTION):
            gradients = (varied[0] + varied[1]) * any(useful)
            flops = round(contraction(self.equation).flops * self.operation.scope.share)
            return flops * (1 + gradients)
        return self.kernel_flops() * (3 if any(varied) and any(useful) else 1)

    def kernel_flops(self) -> int:
        """Forward FLOPs of attention, as a kernel declares them, or else of its body."""
        pattern = self.operation.attention
        if pattern is not None and not pattern.is_backward:
            query, key = map(shape, self.equation.invars[:2])
            return attention_flops(query, key[1], pattern)
        declared = self.equation.params.get("cost_estimate")
        if declared is not None:
            return declared.flops
        mapping = self.equation.params.get("grid_mapping")
        rounds = 1 if mapping is None else math.prod(mapping.grid)
        return rounds * sum(body.forward_flops for body in self.bodies)


class _Scan(_Active):
    """A loop: what a round makes varied is so in the next, and what it finds useful in the last."""

    def __init__(self, operation: Operation):
        super().__init__(operation)
        (self.body,), (inside,) = self.bodies, sub_jaxprs(self.equation)
        self.first, self.carry = constants_and_carry(inside, self.equation)

    def varied(self, arguments: Flags) -> list[bool]:
        return self.body.varied(self._varied_in(arguments))

    def useful(self, results: Flags) -> list[bool]:
        return self.body.useful(self._useful_out(results))

    def flops(self, varied: Flags, useful: Flags) -> int:
        inside = self.body.flops(self._varied_in(varied), self._useful_out(useful))
        return self.equation.params["length"] * inside

    def _varied_in(self, arguments: Flags) -> list[bool]:
        return _fixed_point(self.body.varied, arguments, 0, self.first, self.carry)

    def _useful_out(self, results: Flags) -> list[bool]:
        return _fixed_point(self.body.useful, results, self.first, 0, self.carry)


def _fixed_point(
    round: Callable[[Flags], list[bool]], flags: Flags, source: int, target: int, carry: int
) -> list[bool]:
    """Fixed point of the flags of a loop; those of the carry go from one end to the other."""
    known = list(flags)
    while True:
        result = round(known)
        new = [known[target + i] or result[source + i] for i in range(carry)]
        if new == known[target : target + carry]:
            return known
        known[target : target + carry] = new


class _While(_Active):
    """A loop of unknown length, which has no derivative backwards."""

    def __init__(self, operation: Operation):
        super().__init__(operation)
        self.is_cut = not self.is_free

    def flops(self, varied: Flags, useful: Flags) -> int:
        return self.kernel_flops()


class _Branches(_Active):
    """A conditional: counted by the branch that takes most."""

    def varied(self, arguments: Flags) -> list[bool]:
        return _any(body.varied(arguments[1:]) for body in self.bodies)

    def useful(self, results: Flags) -> list[bool]:
        return [False, *_any(body.useful(results) for body in self.bodies)]

    def flops(self, varied: Flags, useful: Flags) -> int:
        return max(body.flops(varied[1:], useful) for body in self.bodies)


def _any(branches: Iterable[list[bool]]) -> list[bool]:
    return [any(flags) for flags in zip(*branches, strict=True)]


def _active(operation: Operation) -> _Active:
    rules = {"scan": _Scan, "while": _While, "cond": _Branches}
    return rules.get(operation.equation.primitive.name, _Active)(operation)


def attention_flops(query: Sequence[int], slots: int, pattern: Pattern) -> int:
    """FLOPs of attention, of queries of this shape to `slots` keys: scores, and mixed values."""
    batch, length, heads, dim = query
    return 2 * 2 * batch * heads * dim * pattern.pairs(length, slots)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
