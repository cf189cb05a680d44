"""A language model of gated recurrent units: a family as somebody else would add it, one file."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.context import enter
from windlass.layers.embedding import Embedding
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Plain
from windlass.layers.stack import Stack, stacked


@section
class Config:
    """A GRU language model from scratch."""

    vocab: int
    embed: int
    state: int  # what a unit remembers
    layers: int
    eps: float = 1e-6  # added to the variance in every norm

    causal = True

    @property
    def sizes(self) -> dict[str, int]:
        return dict(vocab=self.vocab, embed=self.embed, state=self.state, gates=3)

    def init(self, key: PRNGKeyArray) -> "Recurrent":
        embedding, blocks, head = jax.random.split(key, 3)
        return Recurrent(
            embedding=Embedding(self.sizes, key=embedding),
            blocks=stacked([lambda key, layer: Unit(self, key=key)], self.layers, key=blocks),
            norm=RMSNorm("embed", self.sizes, eps=self.eps),
            head=Head.init(self.sizes, key=head),
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(vocab=96, embed=32, state=24, layers=2, eps=1e-3)


class Unit(eqx.Module):
    norm: RMSNorm
    reads: Linear
    recalls: Linear
    writes: Linear
    recurrence_residual: Connection

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        reads, recalls, writes = jax.random.split(key, 3)
        self.norm = RMSNorm("embed", config.sizes, eps=config.eps)
        self.reads = Linear("embed", "gates state", config.sizes, bias=True, key=reads)
        self.recalls = Linear("state", "gates state", config.sizes, bias=True, key=recalls)
        self.writes = Linear("state", "embed", config.sizes, key=writes)
        self.recurrence_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def branch(x):
            start = jnp.zeros(self.recalls.weight.shape[0], x.dtype)
            return self.writes(context.recur(self.cell, start, self.reads(self.norm(x))))

        return self.recurrence_residual(x, branch, context)

    def cell(self, state: Float[Array, "batch state"], x: Float[Array, "batch gates state"]):
        recalled = self.recalls(state)
        reset, update = (jax.nn.sigmoid(x[:, i] + recalled[:, i]) for i in range(2))
        fresh = jnp.tanh(x[:, 2] + reset * recalled[:, 2])
        state = (1 - update) * fresh + update * state
        return state, state


class Recurrent(eqx.Module):
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
