"""The gated feed-forward layer."""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.linear import Linear


class SwiGLU(eqx.Module):
    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, sizes: dict[str, int], *, bias: bool = False, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed", "mlp", sizes, bias=bias, key=gate)
        self.up = Linear("embed", "mlp", sizes, bias=bias, key=up)
        self.down = Linear("mlp", "embed", sizes, bias=bias, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        return self.down(jax.nn.silu(gate) * up)
