"""Root-mean-square normalisation."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from windlass.devices.axes import Placed, gathered


class RMSNorm(Placed):
    scale: Float[Array, "*layers size"]
    over: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.scale = jnp.ones(sizes[over])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"scale": (self.over,)}

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + self.eps)
        return (normed * gathered(self.scale, (self.over,))).astype(x.dtype)
