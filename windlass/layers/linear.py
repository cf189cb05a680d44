"""A matrix between named axes."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import Placed, gathered, layout
from windlass.layers.initializers import Draw, narrow


class Linear(Placed):
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
        draw: Draw = narrow,
        key: PRNGKeyArray,
    ):
        self.reads, self.writes = tuple(reads.split()), tuple(writes.split())
        shape = tuple(sizes[name] for name in self.reads + self.writes)
        fan_in = math.prod(shape[: len(self.reads)])
        self.weight = draw(key, shape, fan_in)
        self.bias = jnp.zeros(shape[len(self.reads) :]) if bias else None

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
        """The matmul, without the bias."""
        weight = gathered(self.weight.astype(x.dtype), self.axes["weight"])
        contracted = len(self.reads)
        leading = x.shape[: x.ndim - contracted]
        out = layout(
            ("batch", "seq", "")[: len(leading)] + self.writes,
            leading + weight.shape[contracted:],
        )
        return jnp.tensordot(x, weight, axes=contracted, out_sharding=out)
