"""Hyper-connections that nobody asked for: n streams, mixed at every branch without constraints."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.config import section
from windlass.devices.axes import Placed, shard
from windlass.layers.initializers import zeros
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Branch, Connection, Plain
from windlass.residuals import BaseResidual

Streams = Float[Array, "batch seq streams embed"]


@section
class Residual(BaseResidual):
    """Hyper-connections: streams that are read, mixed and written by learned weights."""

    streams: int = 4

    def __post_init__(self):
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}; it must be 1 or more")

    def widen(self, x: Float[Array, "batch seq embed"]) -> Array:
        if self.streams == 1:
            return x
        copies = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))
        return shard(copies, "batch seq . embed")

    def narrow(self, x: Array) -> Float[Array, "batch seq embed"]:
        return x if self.streams == 1 else jnp.mean(x, axis=2)

    def connection(
        self, branch: str, layer: Int[Array, ""], sizes: Mapping[str, int], *, key: PRNGKeyArray
    ) -> Connection:
        return Plain() if self.streams == 1 else Hyper(self.streams, layer, dict(sizes), key)


class Hyper(Connection, Placed):
    """A branch F on n streams x: c = r x, then A x + b F(c), each of them moved by the token.

    A + tanh(A' norm(c)) mixes, and so do b + tanh(b' norm(c)) and what c is corrected by. With n
    equal streams, A = I, b = 1 and r one stream, another in each layer, this is x + F(x).
    """

    mix: Float[Array, "*layers streams streams"]
    read: Float[Array, "*layers streams"]
    write: Float[Array, "*layers streams"]
    norm: RMSNorm
    moved: Linear
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, n: int, layer: Int[Array, ""], sizes: dict[str, int], key: PRNGKeyArray):
        sizes = sizes | {"streams": n, "weights": n + 2}
        self.mix, self.write = jnp.eye(n), jnp.ones(n)
        self.read = jax.nn.one_hot(layer % n, n)
        self.norm = RMSNorm("embed", sizes, eps=1e-6)
        self.moved = Linear("embed", "weights streams", sizes, initializer=zeros, key=key)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"mix": ("streams", "streams"), "read": ("streams",), "write": ("streams",)}

    def __call__(self, x: Streams, branch: Branch, context) -> Streams:
        chosen = jnp.einsum("n,bsne->bse", self.read.astype(x.dtype), x)
        moved = jnp.tanh(self.moved(self.norm(chosen)).astype(jnp.float32))
        mix = (self.mix + moved[:, :, :-2]).astype(x.dtype)
        write = (self.write + moved[:, :, -2]).astype(x.dtype)
        read = moved[:, :, -1].astype(x.dtype)
        gain = jnp.max(jnp.sum(jnp.abs(mix), axis=-1), axis=-1).astype(jnp.float32)
        context.auxiliary("gain_{layer}", jnp.sum(gain), gain.size)
        y = branch(chosen + jnp.einsum("bsn,bsne->bse", read, x))
        mixed = jnp.einsum("bsmn,bsne->bsme", mix, x)
        return checkpoint_name(mixed + jnp.einsum("bsn,bse->bsne", write, y), "residual")
