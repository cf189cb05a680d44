"""Reservoir language model: the recurrent part is fixed and random, what is around it learns.

A block reads the states of its reservoirs (and products of delayed inputs, NVAR) by an MLP, and a
gate mixes what that gives into the stream:

    u = W₂ GELU(W₁ LayerNorm(features)), g = sigmoid(W x), x ← g x + (1 − g) u

The hybrid has a second path beside it, a diagonal state space with a readout of its own.
"""

from collections.abc import Iterator
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass import dynamics
from windlass.config import below_one, section
from windlass.layers.auxiliary import Report
from windlass.layers.context import enter
from windlass.layers.dropout import Dropout
from windlass.layers.embedding import Embedding, LearnedPositions
from windlass.layers.head import Head
from windlass.layers.kv_cache import KVCache
from windlass.layers.linear import Linear
from windlass.layers.norm import LayerNorm
from windlass.layers.stack import Stack, stacked
from windlass.models import Diagnosis
from windlass.networks.reservoir import (
    AnyReservoir,
    DelayProducts,
    LeakyReservoir,
    Reservoir,
    StateSpace,
    each,
    reservoir,
    states,
)

EPS = 1e-5  # of the norms


@section
class NVAR:
    """Nonlinear vector autoregression: 1, the last projected inputs, and all their products."""

    delays: int  # inputs, the own one included
    projected: int  # dimensions that an input is projected to; products are quadratic in them

    def __post_init__(self):
        if problems := below_one(self, "delays", "projected"):
            raise ValueError(*problems)


@section
class Config:
    """A language model of fixed random reservoirs from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    layers: int  # number of blocks
    # fixed reservoirs of each block, side by side; may be empty where there is nvar
    reservoirs: tuple[Reservoir, ...]
    readout: int  # hidden size of the MLP that reads their states
    # block: reservoirs alone; hybrid: a diagonal state space beside them
    variant: Literal["block", "hybrid"] = "block"
    nvar: NVAR | None = None  # products of delayed inputs, beside the states; null: none
    positions: int | None = None  # learned positions: the longest sequence; null: none
    dropout: float = 0.0  # in the MLP
    seed: int = 0  # random seed of all that is fixed, whatever that of the run is
    tied: bool = True  # tie the output head to the embedding

    causal = True

    def __post_init__(self):
        problems = below_one(self, "vocab", "embed", "layers", "readout", "positions")
        if not self.reservoirs and self.nvar is None:
            problems.append("reservoirs is empty, and nvar is null: one of them must be there")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}; it is a share, 0 or more and below 1")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; it must be 0 or more")
        if problems:
            raise ValueError(*problems)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(vocab=self.vocab, embed=self.embed, readout=self.readout)

    @property
    def longest(self) -> int | None:
        """Length of the longest sequence that there are positions for."""
        return self.positions

    @property
    def features(self) -> int:
        """Numbers that a readout reads of each position."""
        units = sum(one.size for one in self.reservoirs)
        products = self.nvar and DelayProducts.count(self.nvar.delays, self.nvar.projected)
        return units + (products or 0)

    def init(self, key: PRNGKeyArray) -> "ReservoirModel":
        return ReservoirModel(self, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        leaky = Reservoir(size=24, radius=0.8, leak=0.7, density=0.5, input_scale=0.5)
        window = Reservoir(size=16, window=3, decay=0.8, density=0.7, activation="relu")
        return cls(
            vocab=96,
            embed=32,
            layers=2,
            reservoirs=(leaky, window),
            readout=20,
            variant="hybrid",
            nvar=NVAR(delays=2, projected=3),
            positions=64,
            dropout=0.1,
            seed=3,
            tied=False,
        )


class Readout(eqx.Module):
    """The readout of a reservoir: LayerNorm, Linear, GELU, dropout, Linear."""

    norm: LayerNorm
    hidden: Linear
    dropout: Dropout
    output: Linear

    def __init__(self, over: str, config: Config, sizes: dict[str, int], *, key: PRNGKeyArray):
        hidden, output = jax.random.split(key)
        self.norm = LayerNorm(over, sizes, eps=EPS)
        self.hidden = Linear(over, "readout", sizes, bias=True, key=hidden)
        self.dropout = Dropout(config.dropout, (config.layers,))
        self.output = Linear("readout", "embed", sizes, bias=True, key=output)

    def __call__(
        self, features: Float[Array, "batch seq features"], dtype: jnp.dtype
    ) -> Float[Array, "batch seq embed"]:
        hidden = self.hidden(self.norm(features).astype(dtype))
        hidden = jax.nn.gelu(checkpoint_name(hidden, "up"))
        return self.output(self.dropout(hidden, ("batch", "seq", "readout")))


class HybridPath(eqx.Module):
    """The second path of a hybrid, and its share of the update: m r + (1 − m) s."""

    state_space: StateSpace
    readout: Readout
    share: Linear

    def __init__(self, config: Config, sizes: dict[str, int], layer: Array, *, key: PRNGKeyArray):
        space, readout, share = jax.random.split(key, 3)
        fixed = _fixed_key(config, layer, len(config.reservoirs))
        self.state_space = StateSpace(sizes, key=space, fixed_key=fixed)
        self.readout = Readout("channels", config, sizes, key=readout)
        self.share = Linear("embed", "channels", sizes, bias=True, key=share)

    def __call__(self, x: Array, other: Array, context) -> Array:
        share = jax.nn.sigmoid(self.share(x))
        own = self.readout(self.state_space(x, context), x.dtype)
        return share * other + (1 - share) * own


class ReservoirBlock(eqx.Module):
    """Reservoirs and products of one input, their readout, and a gate: x ← g x + (1 − g) u."""

    norm: LayerNorm
    reservoirs: tuple[AnyReservoir, ...]
    products: DelayProducts | None
    readout: Readout
    mixture: HybridPath | None
    gate: Linear

    def __init__(self, config: Config, layer: Int[Array, ""], *, key: PRNGKeyArray):
        products, readout, mixture, gate = jax.random.split(key, 4)
        sizes = config.sizes | dict(features=config.features, channels=config.embed)
        self.norm = LayerNorm("embed", sizes, eps=EPS)
        self.reservoirs = tuple(
            reservoir(one, config.embed, key=_fixed_key(config, layer, number))
            for number, one in enumerate(config.reservoirs)
        )
        self.products = self.mixture = None
        if config.nvar is not None:
            sizes |= dict(projected=config.nvar.projected)
            self.products = DelayProducts(sizes, config.nvar.delays, key=products)
        self.readout = Readout("features", config, sizes, key=readout)
        if config.variant == "hybrid":
            self.mixture = HybridPath(config, sizes, layer, key=mixture)
        self.gate = Linear("embed", "channels", sizes, bias=True, key=gate)

    def __call__(self, x: PyTree, context) -> PyTree:
        gate = jax.nn.sigmoid(checkpoint_name(self.gate(x), "gate"))
        update = self.update(self.norm(x), context)
        return checkpoint_name(gate * x + (1 - gate) * update, "residual")

    def update(
        self, x: Float[Array, "batch seq embed"], context
    ) -> Float[Array, "batch seq embed"]:
        features = states(self.reservoirs, x, context)
        if self.products is not None:
            features.append(self.products(x, context))
        update = self.readout(jnp.concatenate(features, axis=-1), x.dtype)
        return update if self.mixture is None else self.mixture(x, update, context)


class ReservoirModel(eqx.Module):
    """Embedding and positions, LayerNorm, Linear, GELU; blocks; LayerNorm, head."""

    embedding: Embedding
    positions: LearnedPositions | None
    input_norm: LayerNorm
    input: Linear
    blocks: Stack
    norm: LayerNorm
    output: Head | None  # None: the head shares the embedding's weight

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        embedding, positions, entry, blocks, head = jax.random.split(key, 5)
        sizes = config.sizes | dict(channels=config.embed, positions=config.positions or 0)
        self.embedding = Embedding(sizes, key=embedding)
        self.positions = None
        if config.positions is not None:
            self.positions = LearnedPositions(sizes, key=positions)
        self.input_norm = LayerNorm("embed", sizes, eps=EPS)
        self.input = Linear("embed", "channels", sizes, bias=True, key=entry)
        make = lambda key, layer: ReservoirBlock(config, layer, key=key)  # noqa: E731
        self.blocks = stacked([make], config.layers, key=blocks)
        self.norm = LayerNorm("embed", sizes, eps=EPS)
        self.output = None if config.tied else Head.init(sizes, key=head)

    @property
    def head(self) -> Head:
        return Head(self.embedding.weight) if self.output is None else self.output

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Report, PyTree]:
        context = enter(batch, cache)
        x = self.embedding(batch["tokens"])
        if self.positions is not None:
            x += self.positions(batch["position"])
        x = jax.nn.gelu(self.input(self.input_norm(x)))
        past = None if cache is None else cache.layers
        x, layers, auxiliary = self.blocks(x, context, past)
        return self.norm(x), auxiliary, context.finish(layers)

    def facts(self) -> Iterator[tuple[str, str]]:
        return facts(self)

    def diagnose(self) -> Diagnosis:
        return diagnosis(self)


def facts(model: PyTree) -> Iterator[tuple[str, str]]:
    """Measured spectral radius and density of every reservoir of a model, beside those asked."""
    for name, one in each(model):
        measured = _measured(one)
        radius = ""
        if one.about.radius is not None:
            radius = f"spectral radius {measured['radius']:.4f} (asked {one.about.radius:g}), "
        density = f"density {measured['density']:.4f} (asked {one.about.density:g})"
        yield "reservoir", f"{name}: {one.about.size} units, {radius}{density}"


def diagnosis(model: PyTree) -> Diagnosis:
    """Measures of every reservoir of a model, and the memory of each by delay."""
    rows, curves = [], {}
    for name, one in each(model):
        width, units, scale = one.inputs.shape[-2], one.about.size, one.about.input_scale
        found = dynamics.measure(one.simulated, width, units, scale)
        measured = _measured(one)
        rows.append(
            {
                "part": name,
                "units": one.about.size,
                "asked_radius": one.about.radius,
                "radius": measured["radius"],
                "asked_density": one.about.density,
                "density": measured["density"],
                "memory_capacity": found.memory_capacity,
                "separation": found.separation,
                "echo_ratio": found.echo,
                "forgets_its_start": found.forgets,
            }
        )
        curves[name] = list(enumerate(found.memory.tolist(), start=1))
    return Diagnosis(rows, curves, "memory: squared correlation of a reconstruction, by delay")


def _measured(one: AnyReservoir) -> dict[str, float | None]:
    is_leaky = isinstance(one, LeakyReservoir)
    weight = np.asarray(one.recurrent if is_leaky else one.inputs)
    radius = dynamics.spectral_radius(weight) if is_leaky else None
    return {"radius": radius, "density": float((weight != 0).mean())}


def _fixed_key(config: Config, layer: Array, number: int) -> PRNGKeyArray:
    """The key of a fixed part of a layer, which follows from the seed of the model alone."""
    own = jax.random.fold_in(jax.random.key(config.seed), layer)
    return jax.random.fold_in(own, number)
