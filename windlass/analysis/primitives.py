"""The primitives of a jaxpr: one table for liveness, the cost model and the count of FLOPs.

A primitive has a kind, by which each analysis knows what a compiler makes of it. One that is not in
the table is a kernel of its own, which reads what it is given from memory and writes its results.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


class Kind(Enum):
    """Kind of a primitive: what a compiler makes of it."""

    CALL = auto()  # of another jaxpr, which is compiled in its place
    LOOP = auto()  # scan, while, cond: bodies that are compiled by themselves
    MATMUL = auto()
    CONVOLUTION = auto()
    KERNEL = auto()  # Pallas: fused with nothing, and may declare its cost
    ELEMENTWISE = auto()
    RANDOM = auto()  # bits from a counter
    LAYOUT = auto()  # moves elements and computes nothing
    INDEXING = auto()  # the same, and reads only as much as it writes
    ALIAS = auto()  # its argument under another name or shape
    RESIDUAL = auto()  # the same, written once more for the backward pass
    TRANSPOSE = auto()  # free for a matmul, which takes axes in any order
    REDUCTION = auto()
    CUMULATIVE = auto()
    UPDATE = auto()  # writes into its first argument, in place where nothing else reads that
    RESHARD = auto()  # another layout over devices: an all-gather, or a slice
    COLLECTIVE = auto()
    OPAQUE = auto()


class Primitive(NamedTuple):
    """Properties of a primitive: a row of the table."""

    kind: Kind
    operations: int = 1  # on the vector units for each element, in sums that would take as long
    is_cheap: bool = False  # to compute again for each of its readers
    is_scaling: bool = False  # of a sum over devices, which may as well be taken after it
    has_derivative: bool = True  # that is not zero everywhere
    collective: str | None = None


def _rows(kind: Kind, names: str, **about: Any) -> dict[str, Primitive]:
    return {name: Primitive(kind, **about) for name in names.split()}


_TABLE: dict[str, Primitive] = {
    **_rows(
        Kind.CALL,
        "jit pjit closed_call core_call remat2 remat checkpoint custom_jvp_call custom_vjp_call "
        "custom_vjp_call_jaxpr shard_map",
    ),
    **_rows(Kind.LOOP, "scan while cond"),
    **_rows(Kind.MATMUL, "dot_general ragged_dot_general"),
    **_rows(Kind.CONVOLUTION, "conv_general_dilated"),
    **_rows(Kind.KERNEL, "pallas_call sketched_kernel"),
    **_rows(
        Kind.ELEMENTWISE,
        "abs add add_any and atan2 bitcast_convert_type clamp clz eq erf_inv ge gt integer_pow le "
        "lt max min ne nextafter not or population_count random_fold_in random_split random_unwrap "
        "random_wrap real rem select_n shift_left shift_right_arithmetic shift_right_logical "
        "square sub tan xor",
    ),
    **_rows(Kind.ELEMENTWISE, "ceil floor is_finite round sign", has_derivative=False),
    **_rows(
        Kind.ELEMENTWISE,
        "cos erf exp exp2 expm1 log log1p logistic rsqrt sin sqrt tanh",
        operations=4,
    ),
    **_rows(Kind.ELEMENTWISE, "pow", operations=8),
    **_rows(Kind.ELEMENTWISE, "mul neg", is_scaling=True),
    **_rows(Kind.ELEMENTWISE, "div", operations=4, is_scaling=True),
    **_rows(Kind.ELEMENTWISE, "convert_element_type", is_cheap=True, is_scaling=True),
    # By threefry: for each number twenty rounds of five operations, and keys added between them.
    **_rows(Kind.RANDOM, "random_bits threefry2x32", operations=115, has_derivative=False),
    **_rows(Kind.LAYOUT, "broadcast_in_dim iota", operations=0, is_cheap=True),
    **_rows(Kind.LAYOUT, "concatenate pad rev split", operations=0),
    **_rows(Kind.INDEXING, "slice", operations=0, is_cheap=True),
    **_rows(Kind.INDEXING, "dynamic_slice gather", operations=0),
    **_rows(
        Kind.ALIAS,
        "copy copy_p expand_dims layout_constraint name optimization_barrier pbroadcast pvary "
        "reshape squeeze",
        operations=0,
    ),
    # As JAX marks what a forward pass saves, to the precision that it has.
    **_rows(Kind.RESIDUAL, "reduce_precision"),
    **_rows(Kind.ALIAS, "stop_gradient", operations=0, has_derivative=False),
    **_rows(Kind.TRANSPOSE, "transpose", operations=0, is_cheap=True),
    **_rows(Kind.REDUCTION, "reduce_max reduce_min reduce_prod reduce_sum"),
    **_rows(Kind.REDUCTION, "argmax argmin reduce_and reduce_or", has_derivative=False),
    **_rows(Kind.CUMULATIVE, "cumlogsumexp cummax cummin cumprod cumsum"),
    **_rows(
        Kind.UPDATE,
        "dynamic_update_slice scatter scatter-add scatter-max scatter-min scatter-mul scatter_add",
    ),
    **_rows(Kind.RESHARD, "mesh_cast reshard sharding_constraint"),
    **_rows(Kind.COLLECTIVE, "pmax pmin psum psum_invariant", collective="all-reduce"),
    **_rows(Kind.COLLECTIVE, "all_gather", collective="all-gather"),
    **_rows(Kind.COLLECTIVE, "reduce_scatter", collective="reduce-scatter"),
    **_rows(Kind.COLLECTIVE, "all_to_all", collective="all-to-all"),
    **_rows(Kind.COLLECTIVE, "ppermute", collective="collective-permute"),
}
_OPAQUE = Primitive(Kind.OPAQUE)
# Functions with a derivative of their own, whatever their bodies compute.
_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def primitive(equation: JaxprEqn) -> Primitive:
    """The row of an equation's primitive."""
    return _TABLE.get(equation.primitive.name, _OPAQUE)


def has_own_derivative(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _OWN_DERIVATIVE


def sub_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls, by its parameters."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def constants_and_carry(body: Jaxpr, equation: JaxprEqn) -> tuple[int, int]:
    """Numbers of constants and of carries among the arguments of a scan; slices follow."""
    # By shapes: a slice has an axis less inside, as has what is stacked.
    carry = sum(map(_is_alike, body.outvars, equation.outvars))
    return sum(map(_is_alike, body.invars, equation.invars)) - carry, carry


def _is_alike(inside: Any, outside: Any) -> bool:
    return shape(inside) == shape(outside)


def shape(variable: Any) -> tuple[int, ...]:
    """The shape of an array on all devices together."""
    return variable.aval.shape


class Contraction(NamedTuple):
    """A matmul, or a convolution as one: [m, k] by [k, n], `batch` of them."""

    m: int
    n: int
    k: int
    batch: int
    contracted: Sequence[int]  # axes of the left factor

    @property
    def is_depthwise(self) -> bool:
        """Return True if each output has a group of its own: no work for matrix units."""
        return self.batch > 1 and self.n == 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch


Shape = Callable[[Any], tuple[int, ...]]


def contraction(equation: JaxprEqn, shape: Shape = shape) -> Contraction:
    """The contraction of a matmul or a convolution, of arrays of these shapes."""
    if primitive(equation).kind is Kind.CONVOLUTION:
        return _convolution(equation, shape)
    ragged = equation.params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
    (contracted, _), (batched, _) = numbers
    left, right = (shape(variable) for variable in equation.invars[:2])
    # Of a grouped matmul each row has one of the matrices, and not all of them.
    groups = math.prod(right[axis] for axis in ragged.rhs_group_dimensions) if ragged else 1
    k, batch = (math.prod(left[axis] for axis in axes) for axes in (contracted, batched))
    m, n = math.prod(left) // max(1, k * batch), math.prod(right) // max(1, k * batch * groups)
    return Contraction(m, n, k, batch, contracted)


def _convolution(equation: JaxprEqn, shape_of: Shape) -> Contraction:
    """Positions by taps and input features, times those by output features, in each group."""
    params, (result,) = equation.params, equation.outvars
    (_, filters), numbers = equation.invars, params["dimension_numbers"]
    out, taps = shape_of(result), shape_of(filters)
    feature, inputs = numbers.out_spec[1], numbers.rhs_spec[1]
    groups = params["feature_group_count"] * params["batch_group_count"]
    n = shape(result)[feature] // groups
    k = taps[inputs] * math.prod(taps[axis] for axis in numbers.rhs_spec[2:])
    # Between the elements of a dilated input are zeros, with which nothing is multiplied.
    k = -(-k // math.prod(params["lhs_dilation"]))
    m = math.prod(out) // max(1, out[feature])
    return Contraction(m, n, k, out[feature] // max(1, n), (numbers.lhs_spec[1],))
