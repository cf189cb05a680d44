"""How queries meet keys: the attention kernels, and which of them a device gets."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from windlass.devices.axes import layout, tensor_ways


def attend(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch slots kv_heads dim"],
    v: Float[Array, "batch slots kv_heads dim"],
    *,
    document: Int[Array, "batch seq"],
    slots: Int[Array, "batch slots"],
    first: int | Int[Array, ""],
    window: int | None = None,
    scale: float | None = None,
) -> Float[Array, "batch seq heads dim"]:
    """Mix values by the similarity of queries and keys, each device its own rows and heads.

    Query i stands at slot `first + i` and sees the slots up to its own that hold its document;
    with a window, the last so many of them, its own included. Scores are multiplied by `scale`,
    1/sqrt(dim) where it is not said.
    """
    mix = functools.partial(_mix, window=window, scale=scale)
    rows = layout(("batch",), q.shape[:1])
    if rows is None:  # no mesh
        return mix(q, k, v, document, slots, first)
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
    local = jax.shard_map(mix, in_specs=(*specs, PartitionSpec()), out_specs=heads)
    return local(*[*inputs, jnp.asarray(first, jnp.int32)])


# A part of its own in the program, by whose name its operations are counted.
@functools.partial(jax.jit, static_argnames=("window", "scale"))
def _mix(q, k, v, document, slots, first, *, window, scale):
    back = first + jnp.arange(q.shape[1])[:, None] - jnp.arange(slots.shape[1])
    seen = (back >= 0) & (document[:, :, None] == slots[:, None, :])
    if window is not None:
        seen &= back < window
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale)
