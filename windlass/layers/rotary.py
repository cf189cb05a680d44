"""RoPE, rotary position embeddings: the pairing of entries, their frequencies, and scaling.

A pair (a, b) of a query or key at position p is rotated by p·θ^(−2i/d); YaRN, Llama 3 and linear
scaling slow the low frequencies, so that a model reads further than it was first trained with.
"""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from windlass.config import section

Pairing = Literal["half", "interleaved"]

# What each kind of scaling reads besides its factor.
READS = {
    "linear": (),
    "llama3": ("original_length", "slow", "fast"),
    "yarn": ("original_length", "slow", "fast", "attention_factor", "truncate"),
}
FAST = {"llama3": 4.0, "yarn": 32.0}  # the default; that of slow is 1 in both


@section
class Scaling:
    """RoPE scaling (rope_scaling elsewhere): contexts longer than those first trained with."""

    # linear: position interpolation of all frequencies; llama3 and yarn: high frequencies are kept
    kind: Literal["linear", "llama3", "yarn"]
    factor: float  # by which the context grows and frequencies shrink
    original_length: int | None = None  # context length before scaling; not for linear
    # frequencies of fewer turns within original_length are divided by the whole factor; null is 1;
    # elsewhere low_freq_factor of llama3, beta_slow of yarn
    slow: float | None = None
    # frequencies of more turns are kept; null is 4 in llama3 and 32 in yarn; elsewhere
    # high_freq_factor of llama3, beta_fast of yarn
    fast: float | None = None
    # yarn: scales queries and keys; null is 0.1 ln(factor) + 1. A config with mscale and
    # mscale_all_dim means (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)
    attention_factor: float | None = None
    # yarn: the ramp between slow and fast begins and ends at whole pairs; null is true
    truncate: bool | None = None

    def __post_init__(self):
        reads = READS[self.kind]
        for name in ("original_length", "slow", "fast", "attention_factor", "truncate"):
            value = getattr(self, name)
            if name not in reads and value is not None:
                raise ValueError(f"{name} is {value}; {self.kind} scaling does not read it")
        if self.factor < 1:
            raise ValueError(
                f"factor is {self.factor}; it is 1 or more: how many times further positions reach"
            )
        if not reads:
            return
        if self.original_length is None:
            raise ValueError(
                f"original_length is required by {self.kind} scaling: how many positions the "
                "model was first trained with"
            )
        if self.original_length < 1:
            raise ValueError(f"original_length is {self.original_length}; it must be 1 or more")
        slow, fast = self.bounds
        if not 0 < slow < fast:
            raise ValueError(f"slow is {slow}; it must be above 0 and below fast ({fast})")
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"attention_factor is {self.attention_factor}; it must be above 0")

    @property
    def bounds(self) -> tuple[float, float]:
        """Turns within the original length: below the first slowed, above the second not."""
        slow = 1.0 if self.slow is None else self.slow
        return slow, FAST[self.kind] if self.fast is None else self.fast


@dataclasses.dataclass(frozen=True)
class Rotary:
    """RoPE: rotates the pairs of a query's or key's entries by its position."""

    theta: float
    pairing: Pairing = "half"
    scaling: Scaling | None = None
    share: float = 1.0  # of a head's entries, the first, that are rotated
    # proportional RoPE: the share of a head's pairs, the first, that are rotated, by the
    # frequencies that they have among all pairs
    proportion: float = 1.0

    def __call__(
        self, x: Float[Array, "batch seq heads dim"], position: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads dim"]:
        rotated = self.rotated(x.shape[-1])
        if rotated == x.shape[-1]:
            return self._turned(x, position)
        turned = self._turned(x[..., :rotated], position)
        return jnp.concatenate([turned, x[..., rotated:]], axis=-1)

    def rotated(self, dim: int) -> int:
        """Entries of a head that are rotated, the first."""
        return int(dim * self.share)

    def _turned(
        self, x: Float[Array, "batch seq heads dim"], position: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads dim"]:
        cos, sin = self.turns(position[:, :, None], x.shape[-1], x.dtype)
        if self.pairing == "half":
            left, right = jnp.split(x, 2, axis=-1)
        else:
            left, right = x[..., ::2], x[..., 1::2]
        turned = left * cos - right * sin, right * cos + left * sin
        if self.pairing == "half":
            return jnp.concatenate(turned, axis=-1)
        return jnp.stack(turned, axis=-1).reshape(x.shape)

    def turns(
        self, position: Int[Array, "..."], dim: int, dtype: Any
    ) -> tuple[Float[Array, "... pairs"], Float[Array, "... pairs"]]:
        """Cosine and sine of each pair's angle."""
        # Angles in float32: bfloat16 has no 257, it rounds to 256.
        frequency = self.frequencies(dim).astype(np.float32)
        angle = position[..., None].astype(jnp.float32) * frequency
        gain = np.float32(self.gain)
        sin = (gain * jnp.sin(angle)).astype(dtype)
        return (gain * jnp.cos(angle)).astype(dtype), sin

    def frequencies(self, dim: int) -> np.ndarray:
        """The inverse frequencies of RoPE: radians per position, of each pair."""
        plain = self.theta ** (-np.arange(0, dim, 2) / dim)
        plain[int(self.proportion * dim // 2) :] = 0
        if self.scaling is None:
            return plain
        slowed = _slowed(plain, self.theta, self.scaling)
        return plain * (1 - slowed * (1 - 1 / self.scaling.factor))

    @property
    def gain(self) -> float:
        """The attention factor of YaRN, by which rotated queries and keys are scaled."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        if self.scaling.attention_factor is not None:
            return self.scaling.attention_factor
        return 0.1 * math.log(self.scaling.factor) + 1


def _slowed(plain: np.ndarray, theta: float, scaling: Scaling) -> np.ndarray:
    """The YaRN ramp: the share of the factor that reaches each pair, from 0 to 1."""
    length = scaling.original_length
    if length is None:
        return np.ones_like(plain)
    slow, fast = scaling.bounds
    if scaling.kind == "llama3":
        turns = length * plain / (2 * math.pi)
        return np.clip((fast - turns) / (fast - slow), 0, 1)
    # The places, between pairs, of those that would turn just so often.
    first, last = (
        len(plain) * math.log(length / (turns * 2 * math.pi), theta) for turns in (fast, slow)
    )
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    # A ramp of no width is a step, just behind its place.
    return np.clip((np.arange(len(plain)) - first) / (last - first or 0.001), 0, 1)


def halves(x: np.ndarray, count: int | None = None) -> np.ndarray:
    """The last axis, or its first entries, from interleaved pairs to the half-split order."""
    pairs, rest = x[..., :count], x[..., count or x.shape[-1] :]
    return np.concatenate([pairs[..., ::2], pairs[..., 1::2], rest], axis=-1)


def interleaved(x: np.ndarray, count: int | None = None) -> np.ndarray:
    """The last axis, or its first entries, from the half-split order to interleaved pairs."""
    pairs, rest = x[..., :count], x[..., count or x.shape[-1] :]
    pairs = np.stack(np.split(pairs, 2, axis=-1), axis=-1).reshape(pairs.shape)
    return np.concatenate([pairs, rest], axis=-1)
