"""Gated attention: each head's output is multiplied by a gate of its query's position."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.attention import Attention
from windlass.layers.linear import Linear
from windlass.layers.low_rank import last_output, outputs
from windlass.layers.norm import Fork


class GatedAttention(Attention):
    """Softmax attention times σ(g); queries and g are one map, side by side in each head."""

    def __init__(
        self, sizes: dict[str, int], *, bias: bool = False, key: PRNGKeyArray, **attention
    ):
        query, rest = jax.random.split(key)
        super().__init__(sizes, bias=bias, key=rest, **attention)
        wide = sizes | {"query_and_gate": 2 * sizes["head_dim"]}
        self.query = Linear("embed", "heads query_and_gate", wide, bias=bias, key=query)

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork, context):
        wide, k, v = outputs((self.query, self.key, self.value), x)
        q, gate = jnp.split(wide, 2, axis=-1)
        gate = jax.nn.sigmoid(checkpoint_name(gate, "gate"))
        return last_output(self.output, self.mixed(q, k, v, context) * gate, x)
