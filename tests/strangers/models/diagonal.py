"""A language model of diagonal state spaces behind short convolutions, as Mamba's are."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.devices.axes import Placed, gathered
from windlass.layers import recurrence
from windlass.layers.context import enter
from windlass.layers.embedding import Embedding
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Plain
from windlass.layers.stack import Stack, stacked


@section
class Config:
    """A language model of diagonal state spaces from scratch."""

    vocab: int
    embed: int
    mlp: int  # channels, each with a state of its own
    taps: int  # inputs that a convolution reads
    layers: int

    causal = True

    @property
    def sizes(self) -> dict[str, int]:
        axes = ("vocab", "embed", "mlp", "taps")
        return {name: getattr(self, name) for name in axes}

    def init(self, key: PRNGKeyArray) -> "Model":
        embedding, blocks, head = jax.random.split(key, 3)
        return Model(
            embedding=Embedding(self.sizes, key=embedding),
            blocks=stacked([lambda key, layer: Block(self, key=key)], self.layers, key=blocks),
            norm=RMSNorm("embed", self.sizes, eps=1e-6),
            head=Head.init(self.sizes, key=head),
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(vocab=96, embed=32, mlp=24, taps=3, layers=2)


class Convolution(Placed):
    """A causal depthwise convolution along each document, y_t = Σ_i w_i x_{t-i}."""

    weight: Float[Array, "taps mlp"]
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray):
        shape = (sizes["taps"], sizes["mlp"])
        self.weight = jax.random.normal(key, shape) / sizes["taps"] ** 0.5

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("taps", "mlp")}

    def __call__(self, x: Float[Array, "batch seq mlp"], context):
        weight = gathered(self.weight, self.axes["weight"])
        return jnp.sum(context.before(x, len(weight)) * weight, axis=2)


class Block(eqx.Module):
    """h_t = a_t h_{t-1} + (1 - a_t) u_t with a_t = exp(-softplus(W x_t)); y_t = h_t gate(x_t)."""

    norm: RMSNorm
    reads: Linear
    decays: Linear
    gates: Linear
    writes: Linear
    convolution: Convolution
    scan_residual: Connection

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        self.norm = RMSNorm("embed", config.sizes, eps=1e-6)
        self.reads = Linear("embed", "mlp", config.sizes, key=keys[0])
        self.decays = Linear("embed", "mlp", config.sizes, bias=True, key=keys[1])
        self.gates = Linear("embed", "mlp", config.sizes, key=keys[2])
        self.writes = Linear("mlp", "embed", config.sizes, key=keys[3])
        self.convolution = Convolution(config.sizes, key=keys[4])
        self.scan_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def branch(x):
            x = self.norm(x)
            u = jax.nn.silu(self.convolution(self.reads(x), context))
            # Products of many decays, in float32: bfloat16 has no 0.999.
            decay = jnp.exp(-jax.nn.softplus(self.decays(x).astype(jnp.float32)))
            _, state = context.scan(recurrence.linear, (decay, (1 - decay) * u.astype(jnp.float32)))
            return self.writes(state.astype(x.dtype) * jax.nn.silu(self.gates(x)))

        return self.scan_residual(x, branch, context)


class Model(eqx.Module):
    embedding: Embedding
    blocks: Stack
    norm: RMSNorm
    head: Head

    def __call__(self, batch, cache=None):
        context = enter(batch, cache)
        x = self.embedding(batch["tokens"])
        past = None if cache is None else cache.layers
        x, layers, auxiliary = self.blocks(x, context, past)
        return self.norm(x), auxiliary, context.finish(layers)
