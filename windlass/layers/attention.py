"""Attention with grouped keys and values."""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import rotate


class Attention(eqx.Module):
    """Causal attention over the positions a context lets it see."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    theta: float = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        theta: float,
        bias: bool = False,
        norm_eps: float | None = None,  # None: queries and keys are not normalised
        key: PRNGKeyArray,
    ):
        q, k, v, o = jax.random.split(key, 4)
        self.query = Linear("embed", "heads head_dim", sizes, bias=bias, key=q)
        self.key = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=k)
        self.value = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=v)
        self.output = Linear("heads head_dim", "embed", sizes, bias=bias, key=o)
        self.query_norm = self.key_norm = None
        if norm_eps is not None:
            self.query_norm = RMSNorm("head_dim", sizes, eps=norm_eps)
            self.key_norm = RMSNorm("head_dim", sizes, eps=norm_eps)
        self.theta = theta

    def __call__(self, x: Float[Array, "batch seq embed"], context):
        q = checkpoint_name(self.query(x), "query")
        k = checkpoint_name(self.key(x), "key")
        v = checkpoint_name(self.value(x), "value")
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, context.position, self.theta), rotate(k, context.position, self.theta)
        return self.output(context.attend(q, k, v))
