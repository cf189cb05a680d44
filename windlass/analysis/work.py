"""What one device does in a step: the words in which a plan of time is made."""

from typing import NamedTuple

import jax.numpy as jnp

from windlass.analysis.fusion import Amount
from windlass.layers.pattern import Pattern


class Product(NamedTuple):
    """A matrix product as one device computes it: [m, k] by [k, n], so many at once."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str  # of the factors, the wider of the two
    moved: Amount  # bytes, each factor and the result once
    times: Amount
    part: str  # of the step: products, head or optimiser

    @property
    def flops(self) -> Amount:
        return 2.0 * self.m * self.n * self.k * self.batch


class Attention(NamedTuple):
    """A call of a flash kernel on one device, or of its backward pass."""

    rows: int
    length: int  # of queries in a row
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
        """Of a query and a key that it sees, in all heads."""
        return self.rows * self.heads * self.pattern.pairs(self.length, self.slots)

    @property
    def flops(self) -> Amount:
        """Two products for each pair; backwards five, one of them for the scores once more."""
        return 2 * self.dim * self.pairs * (5 if self.is_backward else 2)

    @property
    def moved(self) -> Amount:
        ends = self.rows * 2 * (self.length * self.heads + self.slots * self.kv_heads) * self.dim
        return ends * jnp.dtype(self.dtype).itemsize * (2 if self.is_backward else 1)


class Collective(NamedTuple):
    """What devices along axes of the mesh do together; the bytes are of the whole, on each."""

    kind: str  # gather, scatter (of a sum), sum, exchange or shift
    axes: tuple[str, ...]
    moved: Amount
    times: Amount
    part: str


class Work(NamedTuple):
    """What one device does in an optimiser step."""

    products: list[Product]
    attention: list[Attention]
    collectives: list[Collective]
    moved: dict[str, Amount]  # bytes that everything else reads and writes, by part
    operations: dict[str, Amount]  # on single numbers, outside of matrix products, by part
    rounds: dict[str, Amount]  # of loops, by part: each waits for the one before it

    @property
    def flops(self) -> Amount:
        """Operations that one device does, recomputation and all."""
        return sum(one.flops * one.times for one in (*self.products, *self.attention))
