"""Attention with grouped queries (GQA), of a layer of a transformer."""

from collections.abc import Callable

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.kernels import spread
from windlass.layers.linear import Linear
from windlass.layers.norm import Norm
from windlass.layers.rotary import Rotary


class Attention(eqx.Module):
    """Softmax attention over the positions of the own document, with RoPE or without."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    rotary: Rotary | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        rotary: Rotary | None,  # None: positions do not turn queries and keys
        bias: bool = False,  # on queries, keys and values
        output_bias: bool = False,
        norm: Callable[[str], Norm] | None = None,  # of queries and keys, over a named axis
        causal: bool = True,  # sees no position after its own
        window: int | None = None,  # positions a query sees, its own included; None: all
        scale: float | None = None,  # of scores; None: 1 / sqrt(head_dim)
        key: PRNGKeyArray,
    ):
        q, k, v, o = jax.random.split(key, 4)
        self.query = Linear("embed", "heads head_dim", sizes, bias=bias, key=q)
        self.key = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=k)
        self.value = Linear("embed", "kv_heads head_dim", sizes, bias=bias, key=v)
        self.output = Linear("heads head_dim", "embed", sizes, bias=output_bias, key=o)
        self.query_norm = None if norm is None else norm("head_dim")
        self.key_norm = None if norm is None else norm("head_dim")
        self.rotary = rotary
        self.causal, self.window, self.scale = causal, window, scale

    def __call__(self, x: Float[Array, "batch seq embed"], context):
        q = checkpoint_name(self.query(x), "query")
        k = checkpoint_name(spread(self.key(x)), "key")
        v = checkpoint_name(spread(self.value(x)), "value")
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            q, k = (self.rotary(x, context.position) for x in (q, k))
        how = dict(causal=self.causal, window=self.window, scale=self.scale)
        return self.output(context.attend(q, k, v, **how))
