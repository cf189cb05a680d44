"""Rotary positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch seq heads dim"], position: Int[Array, "batch seq"], theta: float
) -> Float[Array, "batch seq heads dim"]:
    """Turn pairs (i, i + dim/2), the half-split pairing of Llama and Qwen checkpoints."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # Angles in float32: bfloat16 has no 257, it rounds to 256.
    angle = position[:, :, None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
