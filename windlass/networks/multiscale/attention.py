"""Multiscale attention: every position attends to tokens, and to cells of r, r², ... of them.

With hidden states X_0 = x and X_l = D_l(X_{l-1}), values V_0 = W_v x and V_l = D_l(V_{l-1}) by the
same downsampling D_l, and queries and keys of each scale,

    S_l = softmax(Q_l K_lᵀ / sqrt(d)) V_l,   Q_l = W_q,l x,   K_l = W_k,l X_l
    y = W_o Σ_l w_l S_l

Queries are those of all positions, so that nothing is upsampled: position t sees the cells whose
newest input is at or before t, and RoPE turns a key by the position of its newest input.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.layers.linear import Linear
from windlass.layers.rotary import Rotary
from windlass.networks.multiscale.aggregation import Aggregation, Aggregator, aggregator
from windlass.networks.multiscale.decomposition import (
    AveragePool,
    Convolution,
    Downsampling,
    MaxPool,
)

POOLS = {"average_pool": AveragePool, "max_pool": MaxPool}


class Scale(eqx.Module):
    """Queries and keys of one scale, and the way to it from the next finer one."""

    downsampling: Downsampling | None  # None: the finest, of tokens
    query: Linear
    key: Linear


class MultiscaleAttention(eqx.Module):
    """Softmax attention to tokens and to cells of them, within the own document."""

    scales: tuple[Scale, ...]
    value: Linear
    output: Linear
    aggregation: Aggregator
    stride: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        scales: int,
        stride: int,  # of each scale over the next finer one
        decomposition: str,  # convolution, or one of POOLS
        kernel: int,  # inputs of a cell
        aggregation: Aggregation | None,
        rotary: Rotary,
        bias: bool,
        key: PRNGKeyArray,
    ):
        value, output, weights, *each = jax.random.split(key, 3 + scales)

        def downsampling(key: PRNGKeyArray) -> Downsampling:
            if decomposition == "convolution":
                return Convolution(sizes, kernel, stride, bias=bias, key=key)
            return POOLS[decomposition](kernel, stride)

        def scale(number: int, key: PRNGKeyArray) -> Scale:
            down, q, k = jax.random.split(key, 3)
            return Scale(
                downsampling(down) if number else None,
                Linear("embed", "heads head_dim", sizes, bias=bias, key=q),
                Linear("embed", "heads head_dim", sizes, bias=bias, key=k),
            )

        self.scales = tuple(scale(number, key) for number, key in enumerate(each))
        self.value = Linear("embed", "heads head_dim", sizes, bias=bias, key=value)
        self.output = Linear("heads head_dim", "embed", sizes, bias=bias, key=output)
        self.aggregation = aggregator(aggregation, scales, sizes, key=weights)
        self.stride, self.rotary = stride, rotary

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"], context):
        hidden, value = x, checkpoint_name(self.value(x), "value")
        here, stride, mixed = context, 1, []
        for scale in self.scales:
            if scale.downsampling is not None:
                hidden, value = (scale.downsampling(one, here) for one in (hidden, value))
                here, stride = here.coarser(self.stride), stride * self.stride
            q = checkpoint_name(scale.query(x), "query")
            k = checkpoint_name(scale.key(hidden), "key")
            newest = stride * here.position + stride - 1
            q, k = self.rotary(q, context.position), self.rotary(k, newest)
            mixed.append(context.attend(q, k, value, stride=stride))
        strides = self.stride ** jnp.arange(len(self.scales))[:, None, None]
        seen = context.position + 1 >= strides
        return self.output(self.aggregation(mixed, seen, x, context))
