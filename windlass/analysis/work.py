"""The work of a step on one device: matmuls, attention calls, collectives and memory traffic."""

from typing import NamedTuple

import jax.numpy as jnp

from windlass.analysis.fusion import Amount
from windlass.layers.pattern import Pattern

KERNELS = "kernels"  # the part of those that layers call, in memory traffic


class Matmul(NamedTuple):
    """A per-device matmul, or a convolution as one: [m, k] by [k, n], `batch` of them."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str  # of the factors, the wider of the two
    moved: Amount  # bytes, each factor and the result once
    times: Amount
    part: str  # of the step: matmuls, head or optimiser
    is_rounded: bool = False  # float32 factors may be, before they are multiplied

    @property
    def flops(self) -> Amount:
        return 2.0 * self.m * self.n * self.k * self.batch


class AttentionCall(NamedTuple):
    """A call of a flash kernel on one device, or of its backward pass."""

    batch: int
    length: int  # of queries in a sequence
    slots: int  # of keys and values
    heads: int
    kv_heads: int
    dim: int
    pattern: Pattern
    dtype: str
    times: Amount

    @property
    def is_backward(self) -> bool:
        return self.pattern.is_backward

    @property
    def pairs(self) -> Amount:
        """Pairs of a query and a key that it sees, in all heads."""
        return self.batch * self.heads * self.pattern.pairs(self.length, self.slots)

    @property
    def flops(self) -> Amount:
        """Two matmuls forward; five backward, one of which recomputes the scores."""
        return 2 * self.dim * self.pairs * (5 if self.is_backward else 2)

    @property
    def moved(self) -> Amount:
        ends = self.batch * 2 * (self.length * self.heads + self.slots * self.kv_heads) * self.dim
        return ends * jnp.dtype(self.dtype).itemsize * (2 if self.is_backward else 1)


class Collective(NamedTuple):
    """A collective among the devices along some mesh axes; its bytes are of the unsharded array."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute
    axes: tuple[str, ...]
    moved: Amount
    times: Amount
    part: str


class Work(NamedTuple):
    """The work of an optimiser step on one device."""

    matmuls: list[Matmul]
    attention: list[AttentionCall]
    collectives: list[Collective]
    traffic: dict[str, Amount]  # bytes that everything else reads and writes, by part
    operations: dict[str, Amount]  # of vector units, by part
    rounds: Amount  # of loops, one after the other

    @property
    def flops(self) -> Amount:
        """FLOPs of matmuls and attention, with recomputation."""
        return sum(one.flops * one.times for one in (*self.matmuls, *self.attention))
