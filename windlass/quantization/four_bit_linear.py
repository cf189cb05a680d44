"""A frozen base in 4 bits: what stands in the place of a model's linear maps as it is stored."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from windlass.config.start import FEWEST, FrozenBase
from windlass.devices.axes import gathered, stack_of
from windlass.errors import UserError
from windlass.layers.linear import Linear, LinearMap
from windlass.layers.names import name
from windlass.layers.residual import Connection
from windlass.quantization.four_bit import MIDDLE, FourBitArrays, Kind, dequantized, quantized

Model = TypeVar("Model")


class FourBitLinear(LinearMap):
    """A linear map whose matrix is codes of 4 bits and scales, which nothing changes.

    Codes and scales are all-gathered, and Ŵ is made where it is multiplied: in the forward pass,
    and in dx = dy Ŵᵀ again, so that no pass holds more of it than the map at hand.
    """

    codes: UInt8[Array, "..."]
    scales: Float[Array, "..."]
    zeros: UInt8[Array, "..."] | None
    bias: Float[Array, "..."] | None
    kind: Kind = eqx.field(static=True)
    reads: tuple[str, ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros")

    def __init__(self, linear: Linear, base: FrozenBase):
        self.kind, self.reads, self.writes = base.kind, linear.reads, linear.writes
        size = math.gcd(base.size, linear.weight.shape[self._axis])
        found = quantized(linear.weight, base.kind, size, self._axis, base.scales)
        self.codes, self.scales, zeros = found
        self.zeros = jnp.full(self.scales.shape, MIDDLE, jnp.uint8) if base.zeros else zeros
        self.bias = linear.bias

    @property
    def _axis(self) -> int:
        """The axis along which weights are in groups: the last that is read."""
        return len(self.reads) - 1

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        whole = self.reads + self.writes
        return {"codes": whole, "scales": whole, "zeros": whole, "bias": self.writes}

    @property
    def maps(self) -> dict[str, int]:
        return {"codes": len(self.reads)}

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = self.product(x)
        return y if self.bias is None else y + gathered(self.bias, self.writes).astype(x.dtype)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return _product(self, x)

    def merged(self) -> Linear:
        return Linear.of(self.reads, self.writes, self._dequantized(), self.bias)

    def _dequantized(self) -> Float[Array, "..."]:
        names, like = self.axes["codes"], self.scales.shape
        # As scales can be split: of a group that lies on two devices, neither has all.
        codes, scales = gathered(self.codes, names, like), gathered(self.scales, names)
        zeros = None if self.zeros is None else gathered(self.zeros, names)
        return dequantized(FourBitArrays(codes, scales, zeros), self.kind, self._axis)


@jax.custom_vjp
def _product(node: FourBitLinear, x: Float[Array, "..."]) -> Float[Array, "..."]:
    node, x = _after(node, x)
    return node.merged().product(x)


def _product_forward(node: FourBitLinear, x: Float[Array, "..."]):
    return _product(node, x), (node, _Like(jax.typeof(x)))


def _product_backward(kept: tuple[FourBitLinear, "_Like"], d: Float[Array, "..."]):
    node, like = kept
    node, d = _after(node, d)
    place = None if jax.sharding.get_abstract_mesh().empty else like.type.sharding
    x = jax.ShapeDtypeStruct(like.type.shape, like.type.dtype, sharding=place)
    return None, *jax.linear_transpose(node.merged().product, x)(d)


_product.defvjp(_product_forward, _product_backward)


class _Like(eqx.Module):
    """The type of an array in the place of the array, which is not held."""

    type: Any = eqx.field(static=True)


def _after(
    node: FourBitLinear, x: Float[Array, "..."]
) -> tuple[FourBitLinear, Float[Array, "..."]]:
    """The map once `x` is known, and that `x`, which must be read: a barrier without it is none.

    A compiler that sees several layers would else dequantise all of them first, and hold for the
    backward pass what the forward pass dequantised.
    """
    return jax.lax.optimization_barrier((node, x))


def frozen(model: Model, base: FrozenBase) -> Model:
    """The model with its linear maps in 4 bits; those of residual connections are as they are."""
    maps = dict(_linear_maps(model))
    if not maps:
        raise UserError(f"model.base is {base.kind}; this model has no linear maps to store in it")
    _refuse_cut(maps, base)

    def visit(node: Any) -> Any:
        return _each(lambda one: FourBitLinear(one, base), node) if _is_linear(node) else node

    return jax.tree.map(visit, model, is_leaf=_is_apart)


def _each(change: Any, node: LinearMap) -> Any:
    for _ in stack_of(node):
        change = eqx.filter_vmap(change)
    return change(node)


def _linear_maps(model: Any) -> Iterator[tuple[str, Linear]]:
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_apart):
        if _is_linear(node):
            yield name(path), node


def _refuse_cut(maps: dict[str, Linear], base: FrozenBase) -> None:
    """Refuse maps whose inputs have no groups that are worth their scales."""
    axes = {path: (node.reads[-1], _inputs(node)) for path, node in maps.items()}
    sizes = {path: math.gcd(base.size, inputs) for path, (_, inputs) in axes.items()}
    cut = {path: axes[path] for path, size in sizes.items() if size < FEWEST or size % 2}
    if cut:
        listed = ", ".join(f"{path} ({axis} {size})" for path, (axis, size) in cut.items())
        raise UserError(
            f"model.base is {base.kind} in groups of {base.size} inputs, or fewer that divide "
            f"them, and these maps have no even ones of {FEWEST} or more: {listed}; leave "
            "model.base out"
        )


def _inputs(linear: Linear) -> int:
    """Size of the last axis that a map reads, stacked or not."""
    return linear.weight.shape[linear.weight.ndim - len(linear.writes) - 1]


def _is_linear(node: Any) -> bool:
    """Return True for a map that may be in 4 bits: a router is in float32 always."""
    return isinstance(node, Linear) and not node.precise


def _is_apart(node: Any) -> bool:
    return isinstance(node, Linear | Connection)
