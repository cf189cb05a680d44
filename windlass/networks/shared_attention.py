"""Attention whose values are normed and may be its keys, and one without keys (KV sharing).

Both have normed queries and keys, as `windlass.layers.attention` has them.
"""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.attention import Attention
from windlass.layers.kernels import spread
from windlass.layers.linear import Linear
from windlass.layers.low_rank import last_output, outputs
from windlass.layers.norm import Fork, Norm, normed


class NormedValueAttention(Attention):
    """Softmax attention over values that are normed, v / sqrt(mean(v²) + eps), without a scale."""

    value: Linear | None  # None: values are keys, before their own norm and RoPE
    key_norm: Norm
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        keys_are_values: bool,
        eps: float,
        key: PRNGKeyArray,
        **attention,
    ):
        super().__init__(sizes, key=key, **attention)
        self.eps = eps
        if keys_are_values:
            self.value = None

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork, context):
        maps = (self.query, self.key) if self.value is None else (self.query, self.key, self.value)
        q, k, *own = (spread(one) for one in outputs(maps, x))
        k = checkpoint_name(k, "key")
        v = checkpoint_name(own[0], "value") if own else k
        q = self._turned("query", q, self.query_norm, context.position)
        k = self.normed(k, self.key_norm, context.position)
        v = normed(v, self.eps).astype(v.dtype)
        return last_output(self.output, context.attend(q, k, v, **self.how()), x)


class SharedKVAttention(Attention):
    """Softmax attention to the keys and values of an earlier layer, with queries of its own."""

    key: None
    value: None
    key_norm: None

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray, **attention):
        super().__init__(sizes, key=key, **attention)
        self.key = self.value = self.key_norm = None

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork, context):
        (q,) = outputs((self.query,), x)
        q = self._turned("query", q, self.query_norm, context.position)
        return last_output(self.output, context.attend_shared(q, **self.how()), x)
