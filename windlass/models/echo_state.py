"""Echo-state network: random embeddings through a chain of reservoirs, all fixed; a head learns.

Reservoir i reads the states of reservoir i − 1, the first one embeddings and sinusoidal positions.
The head reads the states of all of them. It is what gradients train, or what a closed form solves
for (`objective: {kind: readout}`), on tokens or on the embeddings of the tokens that come next.
"""

from collections.abc import Iterator
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.devices.axes import Placed, layout
from windlass.layers.auxiliary import Report
from windlass.layers.context import enter
from windlass.layers.head import Head
from windlass.layers.initializers import host
from windlass.layers.kv_cache import KVCache
from windlass.models import Diagnosis
from windlass.models.reservoir import diagnosis, facts
from windlass.networks.reservoir import AnyReservoir, Reservoir, reservoir, states

SLOWEST = 1e4  # base of the wavelengths of sinusoidal positions


@section
class Config:
    """An echo-state network from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    inputs: int  # size of the fixed embeddings; even
    reservoirs: tuple[Reservoir, ...]  # chained: each reads the states of the one before it
    squares: bool = False  # the head also reads the square of every state
    position_scale: float = 0.1  # times sinusoidal positions, which are added to the embeddings
    seed: int = 0  # random seed of all that is fixed, whatever that of the run is

    causal = True

    def __post_init__(self):
        problems = []
        if self.vocab < 1:
            problems.append(f"vocab is {self.vocab}; it must be 1 or more")
        if self.inputs < 2 or self.inputs % 2:
            problems.append(f"inputs is {self.inputs}; sinusoidal positions need an even number")
        if not self.reservoirs:
            problems.append("reservoirs is empty; there must be one or more")
        if self.seed < 0:
            problems.append(f"seed is {self.seed}; it must be 0 or more")
        if problems:
            raise ValueError(*problems)

    @property
    def sizes(self) -> dict[str, int]:
        """`embed` is what the head reads."""
        units = sum(one.size for one in self.reservoirs)
        return dict(vocab=self.vocab, embed=units * (2 if self.squares else 1))

    def init(self, key: PRNGKeyArray) -> "EchoStateNetwork":
        return EchoStateNetwork(self, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        first = Reservoir(size=20, radius=0.8, leak=0.6, density=0.5, input_scale=0.7)
        second = Reservoir(size=16, radius=0.9, leak=0.8, density=0.6, activation="leaky_relu")
        return cls(
            vocab=96,
            inputs=12,
            reservoirs=(first, second),
            squares=True,
            position_scale=0.2,
            seed=3,
        )


class FixedEmbedding(Placed):
    """Random embeddings of tokens, normal of variance 1, in float32."""

    weight: Float[Array, "vocab inputs"]
    matrices: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, shape: tuple[int, int], *, key: PRNGKeyArray):
        self.weight = host(lambda rng, shape, fan_in: rng.normal(size=shape))(key, shape, 1)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("tokens", "inputs")}

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq inputs"]:
        out = layout("batch seq .", (*tokens.shape, self.weight.shape[-1]))
        return self.weight.at[tokens].get(out_sharding=out)


class EchoStateNetwork(eqx.Module):
    embedding: FixedEmbedding
    reservoirs: tuple[AnyReservoir, ...]
    head: Head
    position_scale: float = eqx.field(static=True)
    squares: bool = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        fixed = jax.random.split(jax.random.key(config.seed), 1 + len(config.reservoirs))
        self.embedding = FixedEmbedding((config.vocab, config.inputs), key=fixed[0])
        widths = [config.inputs, *(one.size for one in config.reservoirs)]
        self.reservoirs = tuple(
            reservoir(one, width, key=own)
            for one, width, own in zip(config.reservoirs, widths, fixed[1:], strict=False)
        )
        self.head = Head.init(config.sizes, key=key)
        self.position_scale, self.squares = config.position_scale, config.squares

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Report, PyTree]:
        context = enter(batch, cache)
        view = context.layer(None if cache is None else cache.layers)
        x = self.embedding(batch["tokens"])
        x += self.position_scale * sinusoidal(batch["position"], x.shape[-1])
        hidden = []
        for one in self.reservoirs:
            (x,) = states([one], x, view)
            hidden.append(x)
        hidden += [x**2 for x in hidden] if self.squares else []
        # The precision of the head, in which it is multiplied.
        whole = jnp.concatenate(hidden, axis=-1).astype(self.head.weight.dtype)
        return whole, {}, context.finish(view.leave())

    def facts(self) -> Iterator[tuple[str, str]]:
        return facts(self)

    def diagnose(self) -> Diagnosis:
        return diagnosis(self)


def sinusoidal(position: Int[Array, "batch seq"], width: int) -> Float[Array, "batch seq inputs"]:
    """sin and cos of the position times frequencies 10000^(−2i/width): Vaswani et al., 2017."""
    frequency = SLOWEST ** -(np.arange(0, width, 2, dtype=np.float32) / width)
    angle = position[..., None].astype(jnp.float32) * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
