"""RMSNorm, y = scale · x / sqrt(mean(x²) + eps), and LayerNorm, of centered x; in float32."""

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

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        return (normed(x, self.eps) * self.factor).astype(x.dtype)

    @property
    def factor(self) -> Float[Array, " size"]:
        """By which what is normed is multiplied."""
        return gathered(self.scale, (self.over,))


class OffsetRMSNorm(Placed):
    """A norm whose scale is kept as its distance from 1, as in Gemma checkpoints."""

    offset: Float[Array, "*layers size"]
    over: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.offset = jnp.zeros(sizes[over])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"offset": (self.over,)}

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        return (normed(x, self.eps) * self.factor).astype(x.dtype)

    @property
    def factor(self) -> Float[Array, " size"]:
        return 1 + gathered(self.offset, (self.over,))


class LayerNorm(Placed):
    """y = scale · (x − mean(x)) / sqrt(var(x) + eps) + bias."""

    scale: Float[Array, "*layers size"]
    bias: Float[Array, "*layers size"]
    over: str = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float):
        self.over, self.eps = over, eps
        self.scale, self.bias = jnp.ones(sizes[over]), jnp.zeros(sizes[over])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"scale": (self.over,), "bias": (self.over,)}

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale, bias = (gathered(one, (self.over,)) for one in (self.scale, self.bias))
        return (normed(centered, self.eps) * scale + bias).astype(x.dtype)


Norm = RMSNorm | OffsetRMSNorm


def normed(x: Float[Array, "... size"], eps: float) -> Float[Array, "... size"]:
    """RMSNorm without a scale, x / sqrt(mean(x²) + eps); in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + eps)
