"""Gated MLPs (feed-forward layers): down(activation(gate(x)) · up(x))."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.linear import Linear


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

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        return self.output(gate, up)

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        return self.down(self.activation(gate) * up)


class NormGated(Gated):
    """A gated linear unit of bounded size: down(σ(gate) · RMSNorm(gate ⊙ up)), without a scale.

    With the RMS r of gate ⊙ up this is SwiGLU divided by r, after `down`: gate and up, which are
    large, are then read once.
    """

    eps: float = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], *, eps: float, key: PRNGKeyArray):
        super().__init__(sizes, key=key)
        self.eps = eps

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        square = jnp.square(gate.astype(jnp.float32) * up)
        scale = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + self.eps)
        return self.down(self.activation(gate) * up) * scale.astype(up.dtype)
