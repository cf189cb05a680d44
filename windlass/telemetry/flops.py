"""Floating-point operations of a function, counted in its program and not run.

Counted are matrix products and convolutions, once for every time they are used: a map that a scan
applies 42 times counts 42 times. All else is small beside them. A loop whose length is not known
before it runs counts as one round.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# What causal attention is called in a program, with its window after it. Kernels compute more
# pairs of positions than a model needs, and say nothing of how many: all count as those it needs.
CAUSAL = re.compile(r"causal_attention(?:_(\d+))?")


def forward_flops(function: Callable, *arguments: Any) -> int:
    """Operations of one call, on all devices together; arguments may be shapes without values."""
    program, _, _ = eqx.filter_make_jaxpr(function)(*arguments)
    return _total(program.jaxpr)


def training_flops(forward: int) -> int:
    """Operations of a step: each product has two gradients, of the same size as itself.

    What rematerialisation computes again is no work of the model's, and is not counted.
    """
    return 3 * forward


def _total(program: Jaxpr) -> int:
    return sum(map(_operations, program.eqns))


def _operations(equation: JaxprEqn) -> int:
    params = equation.params
    inner = [_total(program) for program in _programs(params)]
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left, result = _shape(equation.invars[0]), _shape(equation.outvars[0])
            return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
        case "conv_general_dilated":
            kernel, result = _shape(equation.invars[1]), _shape(equation.outvars[0])
            outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
            return 2 * math.prod(result) * math.prod(kernel) // outputs
        case "pallas_call":
            declared = params["cost_estimate"]
            if declared is not None:
                return declared.flops
            return math.prod(params["grid_mapping"].grid) * sum(inner)
        case "scan":
            return params["length"] * sum(inner)
        case "cond":
            return max(inner)
        case "shard_map":
            # Shapes inside are those of one device.
            name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
            return math.prod(params["mesh"].shape[axis] for axis in params[name]) * sum(inner)
        case _:
            attention = CAUSAL.fullmatch(params.get("name") or "")
            return _attention(equation, attention[1]) if attention else sum(inner)


def _attention(equation: JaxprEqn, window: str | None) -> int:
    (rows, length, heads, dim), (_, slots, *_) = map(_shape, equation.invars[:2])
    # A position sees half of those there are, on average, or a window full but for the beginning.
    seen = slots if window is None else min(slots, int(window))
    pairs = length * seen - seen * seen // 2
    return 2 * 2 * rows * heads * dim * pairs


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _programs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each
