"""Linear maps between named axes."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import Placed, device, gathered, layout, replicated
from windlass.layers.initializers import Initializer, narrow


class LinearMap(Placed):
    """Interface of linear maps, whatever arrays they hold: y = x W + b between named axes."""

    reads: eqx.AbstractVar[tuple[str, ...]]
    writes: eqx.AbstractVar[tuple[str, ...]]

    @abstractmethod
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]: ...

    @abstractmethod
    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x W, without the bias."""

    @abstractmethod
    def merged(self) -> "Linear":
        """The one matrix, and bias, that compute the same; in float32 where they are computed."""

    @property
    def low_rank(self) -> "LowRank | None":
        """The same map as a base and a product of low rank beside it, if it computes these two."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis that it reads or writes; of one layer, where maps are stacked."""
        shape = eqx.filter_eval_shape(lambda: self.merged().weight).shape
        return dict(zip(self.reads + self.writes, shape, strict=True))


class Linear(LinearMap):
    """A matrix between named axes, e.g. from `embed` to `heads head_dim`, and perhaps a bias.

    The names fix the shape (sizes come from the model's config, under the same names), what is
    contracted (the last axes of the input), where the weight lives on the mesh, and how it is laid
    out in a Hugging Face checkpoint.
    """

    weight: Float[Array, "..."]
    bias: Float[Array, "..."] | None
    reads: tuple[str, ...] = eqx.field(static=True)
    writes: tuple[str, ...] = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        reads: str,
        writes: str,
        sizes: dict[str, int],
        *,
        bias: bool = False,
        initializer: Initializer = narrow,
        key: PRNGKeyArray,
    ):
        self.reads, self.writes = tuple(reads.split()), tuple(writes.split())
        shape = tuple(sizes[name] for name in self.reads + self.writes)
        fan_in = math.prod(shape[: len(self.reads)])
        self.weight = initializer(key, shape, fan_in)
        self.bias = jnp.zeros(shape[len(self.reads) :]) if bias else None

    @staticmethod
    def of(
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        weight: Float[Array, "..."],
        bias: Float[Array, "..."] | None = None,
    ) -> "Linear":
        """The map of a matrix, and perhaps a bias, that are there already."""
        sizes = dict(zip(reads + writes, weight.shape, strict=True))
        settings = {"initializer": lambda key, shape, fan_in: weight, "key": jax.random.key(0)}
        linear = Linear(" ".join(reads), " ".join(writes), sizes, **settings)
        return eqx.tree_at(lambda one: one.bias, linear, bias, is_leaf=lambda x: x is None)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": self.reads + self.writes, "bias": self.writes}

    @property
    def maps(self) -> dict[str, int]:
        return {"weight": len(self.reads)}

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = self.product(x)
        if self.bias is None:
            return y
        return y + gathered(self.bias, self.writes).astype(x.dtype)

    def product(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        weight = gathered(self.weight.astype(x.dtype), self.axes["weight"])
        contracted, leading = len(self.reads), x.ndim - len(self.reads)
        shape = x.shape[:leading] + weight.shape[contracted:]
        out = layout(("batch", "seq", "")[:leading] + self.writes, shape)
        if device().platform != "cpu" or leading < 2:
            return jnp.tensordot(x, weight, axes=contracted, out_sharding=out)
        # To contract two axes of tokens, in dW = xᵀ dy, XLA for CPUs first writes the transpose of
        # a factor, and computes it a second time where it is made of others.
        tokens, by_token = _by_token(x, leading), _merged(out, leading)
        y = jnp.tensordot(tokens, weight, axes=contracted, out_sharding=by_token)
        return jnp.reshape(y, shape, out_sharding=out)

    def merged(self) -> "Linear":
        return self


class Folded(eqx.Module):
    """Matrices side by side behind an RMSNorm, whose factor they have.

    With the scale s = 1 / sqrt(mean(x²) + eps) and the factor f of the norm, (s f · x) W + b is
    s (x (f · W)) + b, which never writes what is normed.
    """

    weight: Float[Array, "*layers embed features"]  # f · W
    bias: Float[Array, "*layers features"] | None

    @staticmethod
    def of(maps: Sequence[Linear], factor: Float[Array, "*layers embed"]) -> "Folded":
        """Of maps that are stacked as the factor is."""
        flat = [replicated(one.weight).reshape(*factor.shape, -1) for one in maps]
        weight = jnp.concatenate(flat, axis=-1)
        # Its own gradient is computed with that of the norm.
        factor = jax.lax.stop_gradient(replicated(factor))[..., None]
        biases = [one.bias for one in maps if one.bias is not None]
        stack = factor.shape[:-2]
        return Folded(
            (factor * weight.astype(jnp.float32)).astype(weight.dtype),
            jnp.concatenate([replicated(one).reshape(*stack, -1) for one in biases], axis=-1)
            if biases
            else None,
        )

    def product(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq features"]:
        """x (f · W)."""
        return x @ self.weight

    def output(
        self, product: Float[Array, "batch seq features"], scale: Float[Array, "batch seq 1"]
    ) -> Float[Array, "batch seq features"]:
        """The product times the scale, and the bias."""
        y = scale * product.astype(jnp.float32)
        bias = 0 if self.bias is None else self.bias.astype(jnp.float32)
        return (y + bias).astype(product.dtype)


def can_fold(maps: Sequence[LinearMap]) -> bool:
    """Return True if all are matrices, and stacked in an array each, as trained ones are."""
    return all(type(one) is Linear and isinstance(one.weight, jax.Array) for one in maps)


class LowRank(NamedTuple):
    """A linear map as another one, and beside it a product of low rank: y = base(x) + (x A) B."""

    base: LinearMap
    down: Linear  # A, scaled: several of them are copied into one anyway
    up: Linear  # B

    @property
    def rank(self) -> int:
        return len(self.up.weight)


def _by_token(x: Float[Array, "..."], leading: int) -> Float[Array, "..."]:
    """An activation with one axis in place of its leading ones: batch, sequence and the like."""
    spec = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec
    shape = (math.prod(x.shape[:leading]), *x.shape[leading:])
    return jnp.reshape(x, shape, out_sharding=_merged(spec, leading))


def _merged(spec: PartitionSpec | None, leading: int) -> PartitionSpec | None:
    """The partition spec after leading axes, of which only the first is split, are made one."""
    return None if spec is None else PartitionSpec(spec[0], *spec[leading:])
