"""Sampling of the next token: temperature, top-k, top-p, repetition penalty."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from windlass.config.sampling import Sampling


class Settings(NamedTuple):
    """A `Sampling` as the compiled step sees it.

    Values are arguments of the step; only what is None changes the program.
    """

    seed: ArrayLike
    first: ArrayLike  # the number of the first row: chance depends on a row's own
    temperature: ArrayLike | None  # None: the most likely token
    top_k: ArrayLike | None
    top_p: ArrayLike | None
    repetition_penalty: ArrayLike

    @staticmethod
    def of(sampling: Sampling, first: int = 0) -> "Settings":
        def unless(absent, value):
            return None if value in (None, absent) else np.float32(value)

        return Settings(
            seed=np.uint32(sampling.seed),
            first=np.int32(first),
            temperature=unless(0, sampling.temperature),
            top_k=None if sampling.top_k is None else np.int32(sampling.top_k),
            top_p=unless(1, sampling.top_p),
            repetition_penalty=np.float32(sampling.repetition_penalty),
        )


def adjust(
    logits: Float[Array, "batch vocab"],
    seen: Bool[Array, "batch vocab"] | None,  # tokens that are penalised; None: none
    settings: Settings,
) -> Float[Array, "batch vocab"]:
    """The logits to sample from, in float32; minus infinity for tokens that are excluded."""
    s = settings
    if seen is not None:
        fewer = jnp.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = jnp.where(seen, fewer, logits)
    if s.temperature is None:
        return logits
    logits = logits / s.temperature
    if s.top_k is None and s.top_p is None:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    if s.top_k is not None:
        last = jnp.minimum(s.top_k, logits.shape[-1]) - 1
        least = jax.lax.dynamic_index_in_dim(ordered, last, axis=-1)
        logits = jnp.where(logits < least, -jnp.inf, logits)
        ordered = jnp.where(ordered < least, -jnp.inf, ordered)
    if s.top_p is not None:
        share = jax.nn.softmax(ordered, axis=-1)
        # The token that crosses the threshold is kept: what counts is the share of those before.
        is_kept = jnp.cumsum(share, axis=-1) - share < s.top_p
        least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def draw(
    logits: Float[Array, "batch vocab"], index: Int[Array, ""], settings: Settings
) -> Int[Array, " batch"]:
    """Categorical sample of a token for each row; its key is of the seed, row and token index."""
    if settings.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def one(row, logits):
        key = jax.random.key(settings.seed)
        key = jax.random.fold_in(jax.random.fold_in(key, row), index)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    return jax.vmap(one)(settings.first + jnp.arange(logits.shape[0]), logits)
