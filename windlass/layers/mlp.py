"""Gated MLPs (feed-forward layers): down(activation(gate(x)) · up(x))."""

from collections.abc import Callable

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.linear import Linear
from windlass.layers.norm import normed


class Gated(eqx.Module):
    """A gated linear unit: SwiGLU with silu, GeGLU with gelu."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        activation: Callable = jax.nn.silu,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed", "mlp", sizes, bias=bias, key=gate)
        self.up = Linear("embed", "mlp", sizes, bias=bias, key=up)
        self.down = Linear("mlp", "embed", sizes, bias=bias, key=down)
        self.activation = activation

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        return self.down(self.gated(gate, up))

    def gated(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.activation(gate) * up


class NormGated(Gated):
    """A gated linear unit of bounded size: down(σ(gate) · RMSNorm(gate ⊙ up)), without a scale."""

    eps: float = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], *, eps: float, key: PRNGKeyArray):
        super().__init__(sizes, activation=jax.nn.sigmoid, key=key)
        self.eps = eps

    def gated(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.activation(gate) * normed(gate * up, self.eps).astype(gate.dtype)
