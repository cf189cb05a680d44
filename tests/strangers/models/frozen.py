"""A language model of frozen random recurrences: only what leads to and from them is trained."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.devices.axes import Placed, gathered
from windlass.layers.context import enter
from windlass.layers.embedding import Embedding
from windlass.layers.head import Head
from windlass.layers.initializers import Initializer, host
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Plain
from windlass.layers.stack import Stack, stacked


@section
class Config:
    """A model of frozen random recurrences from scratch."""

    vocab: int
    embed: int
    units: int  # of a frozen layer
    layers: int
    radius: float = 0.9  # the spectral radius of a frozen layer
    seed: int = 0  # of the frozen layers, whatever that of the run is

    causal = True

    @property
    def sizes(self) -> dict[str, int]:
        return dict(vocab=self.vocab, embed=self.embed, units=self.units)

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
        return cls(vocab=96, embed=32, units=24, layers=2, radius=0.7, seed=3)


class Reservoir(Placed):
    """A fixed recurrence, h ← tanh(u + h W), in float32 whatever the rest computes in."""

    weight: Float[Array, "units units"]
    matrices: ClassVar[tuple[str, ...]] = ("weight",)
    fixed: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, sizes: dict[str, int], *, draw: Initializer, key: PRNGKeyArray):
        self.weight = draw(key, (sizes["units"], sizes["units"]), sizes["units"])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("units", "units")}

    def __call__(self, u: Float[Array, "batch seq units"], context):
        def cell(state, u):
            state = jnp.tanh(u + state @ gathered(self.weight, self.axes["weight"]))
            return state, state

        start = jnp.zeros(u.shape[-1], jnp.float32)
        return context.recur(cell, start, u.astype(jnp.float32)).astype(u.dtype)


class Block(eqx.Module):
    norm: RMSNorm
    reads: Linear
    reservoir: Reservoir
    writes: Linear
    reservoir_residual: Connection

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        reads, writes = jax.random.split(key)
        self.norm = RMSNorm("embed", config.sizes, eps=1e-6)
        self.reads = Linear("embed", "units", config.sizes, key=reads)
        self.reservoir = Reservoir(
            config.sizes, draw=of_radius(config.radius), key=jax.random.key(config.seed)
        )
        self.writes = Linear("units", "embed", config.sizes, bias=True, key=writes)
        self.reservoir_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def branch(x):
            return self.writes(self.reservoir(self.reads(self.norm(x)), context))

        return self.reservoir_residual(x, branch, context)


def of_radius(radius: float) -> Initializer:
    """Normal, scaled to a spectral radius: W ρ / max |λ(W)|."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
        weight = rng.normal(size=shape)
        return weight * (radius / np.abs(np.linalg.eigvals(weight)).max())

    return host(draw)


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
