"""Floating-point operations of a function, counted in its program and not run.

Counted are matrix products and convolutions, once for every time they are used: a map that a scan
applies 42 times counts 42 times. All else is small beside them. A loop whose length is not known
before it runs counts as one round.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import PyTree

from windlass.layers.pattern import Pattern


class Work(NamedTuple):
    """Operations of a program, and which of its results depend on what is trained."""

    forward: int
    training: int  # with the gradients that are taken, each as large as the product it is of
    moved: list[bool]


def forward_flops(function: Callable, *arguments: Any) -> int:
    """Operations of one call, on all devices together; arguments may be shapes without values."""
    return _counted(function, arguments, trained=0).forward


def training_flops(function: Callable, weights: PyTree, *others: Any) -> int:
    """Operations of a call and of its gradient by `weights`, the first argument.

    A product of two things that depend on them has two gradients; one with a frozen matrix has one
    alone. What rematerialisation computes again is no work of the model's, and is not counted.
    """
    trained = len(jax.tree.leaves(eqx.filter(weights, _is_array)))
    return _counted(function, (weights, *others), trained=trained).training


def _counted(function: Callable, arguments: Sequence[Any], trained: int) -> Work:
    program, _, _ = eqx.filter_make_jaxpr(function)(*arguments)
    return _work(program.jaxpr, [i < trained for i in range(len(program.jaxpr.invars))])


def _work(program: Jaxpr, moved: Sequence[bool]) -> Work:
    known = dict(zip(program.invars, moved, strict=True))
    forward = training = 0

    def is_moved(variable: Any) -> bool:
        return not isinstance(variable, Literal) and known.get(variable, False)

    for equation in program.eqns:
        found = _operations(equation, [is_moved(variable) for variable in equation.invars])
        forward, training = forward + found.forward, training + found.training
        for variable, is_so in zip(equation.outvars, found.moved, strict=True):
            known[variable] = is_so and jnp.issubdtype(_dtype(variable), jnp.inexact)
    return Work(forward, training, [is_moved(variable) for variable in program.outvars])


def _operations(equation: JaxprEqn, moved: list[bool]) -> Work:
    params, results = equation.params, [any(moved)] * len(equation.outvars)

    def product(operations: int) -> Work:
        return Work(operations, operations * (1 + moved[0] + moved[1]), results)

    def kernel(operations: int) -> Work:
        return Work(operations, operations * (3 if any(moved) else 1), results)

    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left, result = _shape(equation.invars[0]), _shape(equation.outvars[0])
            return product(2 * math.prod(result) * math.prod(left[axis] for axis in contracted))
        case "conv_general_dilated":
            filters, result = _shape(equation.invars[1]), _shape(equation.outvars[0])
            outputs = filters[params["dimension_numbers"].rhs_spec[0]]
            return product(2 * math.prod(result) * math.prod(filters) // outputs)
        case "pallas_call":
            declared = params["cost_estimate"]
            if declared is not None:
                return kernel(declared.flops)
            held = sum(_work(one, [False] * len(one.invars)).forward for one in programs(params))
            return kernel(math.prod(params["grid_mapping"].grid) * held)
        case "scan":
            (body,) = programs(params)
            return _repeated(body, moved, equation)
        case "cond":
            found = [_work(branch, moved[1:]) for branch in programs(params)]
            return max(found)._replace(moved=results)
        case "shard_map":
            # Shapes inside are those of one device.
            name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
            devices = math.prod(params["mesh"].shape[axis] for axis in params[name])
            (body,) = programs(params)
            found = _work(body, moved)
            return Work(devices * found.forward, devices * found.training, found.moved)
    pattern = Pattern.of(params.get("name") or "")
    if pattern is not None and not pattern.is_backward:
        (_, slots, *_) = _shape(equation.invars[1])
        return kernel(attention_flops(_shape(equation.invars[0]), slots, pattern))
    found = [_inner(body, moved) for body in programs(params)]
    if len(found) == 1 and len(found[0].moved) == len(results):
        return found[0]
    forward, training = (sum(one.forward for one in found), sum(one.training for one in found))
    return Work(forward, training, results)


def _inner(body: Jaxpr, moved: list[bool]) -> Work:
    if len(body.invars) == len(moved):
        return _work(body, moved)
    return _work(body, [any(moved)] * len(body.invars))


def _repeated(body: Jaxpr, moved: list[bool], equation: JaxprEqn) -> Work:
    """The rounds of a scan; what one of them moves is moved in the next."""
    first, carried = constants_and_carried(body, equation)
    while True:
        found = _work(body, moved)
        new = list(moved)
        for i in range(carried):
            new[first + i] |= found.moved[i]
        if new == moved:
            length = equation.params["length"]
            return Work(length * found.forward, length * found.training, found.moved)
        moved = new


def constants_and_carried(body: Jaxpr, equation: JaxprEqn) -> tuple[int, int]:
    """How many arguments of a scan are the same in all rounds, and how many go on to the next.

    They come in this order, and then what each round has of its own.
    """
    # What each round has of its own has an axis less inside.
    carried = sum(map(_is_alike, body.outvars, equation.outvars))
    return sum(map(_is_alike, body.invars, equation.invars)) - carried, carried


def _is_alike(inside: Any, outside: Any) -> bool:
    return _shape(inside) == _shape(outside)


def attention_flops(query: Sequence[int], slots: int, pattern: Pattern) -> int:
    """Operations of attention, of queries of this shape to so many keys."""
    rows, length, heads, dim = query
    return 2 * 2 * rows * heads * dim * pattern.pairs(length, slots)


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def programs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The programs that an equation calls, by its parameters."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)
