"""Attention with grouped keys and values."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.devices.axes import layout, tensor_ways
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
        mixed = checkpoint_name(context.attend(q, k, v), "mixed")
        return self.output(mixed)


def attend(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch slots kv_heads dim"],
    v: Float[Array, "batch slots kv_heads dim"],
    *,
    document: Int[Array, "batch seq"],
    slots: Int[Array, "batch slots"],
    first: int | Int[Array, ""],
) -> Float[Array, "batch seq heads dim"]:
    """Mix values by the similarity of queries and keys, each device its own rows and heads.

    Query i stands at slot `first + i` and sees the slots up to its own that hold its document.
    """
    rows = layout(("batch",), q.shape[:1])
    if rows is None:  # no mesh
        return _mix(q, k, v, document, slots, first)
    # Each device needs the key head its queries belong to: with fewer key heads than devices, a
    # head is held by several.
    copies = math.lcm(k.shape[2], tensor_ways()) // k.shape[2]
    if copies > 1:
        k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
    heads, row = PartitionSpec(*rows, None, "tensor", None), PartitionSpec(*rows, None)
    specs = (heads, heads, heads, row, row)
    inputs = [
        jax.sharding.reshard(x, spec)
        for x, spec in zip((q, k, v, document, slots), specs, strict=True)
    ]
    mix = jax.shard_map(_mix, in_specs=(*specs, PartitionSpec()), out_specs=heads)
    return mix(*[*inputs, jnp.asarray(first, jnp.int32)])


@jax.jit  # a part of its own in the program, by whose name its operations are counted
def _mix(q, k, v, document, slots, first):
    before = jnp.arange(slots.shape[1]) <= first + jnp.arange(q.shape[1])[:, None]
    seen = before & (document[:, :, None] == slots[:, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
