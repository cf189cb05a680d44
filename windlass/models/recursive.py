"""Recursive reasoning models: Athena, TRM and HRM, small networks that think in cycles.

Embedded inputs, with a prefix and positions, go into the cycles of `networks.recursion`, which
change an answer state z_H and a scratch state z_L. Logits are of z_H, and so is q, which says after
each pass whether another one is worth it. States are handed on from pass to pass.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.config import below_one, section
from windlass.devices.axes import shard
from windlass.layers.attention import Attention
from windlass.layers.auxiliary import Report, added
from windlass.layers.context import Packed, enter
from windlass.layers.embedding import Embedding, IdentifierPrefix, LearnedPositions
from windlass.layers.head import Head
from windlass.layers.initializers import narrow, zeros
from windlass.layers.kv_cache import DecodeContext, KVCache
from windlass.layers.linear import Linear
from windlass.layers.mlp import Gated, NormGated
from windlass.layers.rotary import Rotary
from windlass.layers.stack import Stack, stacked
from windlass.networks.recursion import (
    Cycles,
    InitialStates,
    Latents,
    PostNormBlock,
    States,
    stopped,
)

UNLIKELY = -5.0  # bias of q at first: exploration alone decides when a row halts
CACHED_CALLS = 256  # of networks for a token, whose keys and values are cached in generation

Hidden = Float[Array, "batch seq embed"]  # of the tokens of a row


@section
class Prefix:
    """Positions in front of every row, from a table of identifiers that begins as zeros."""

    positions: int  # number of them
    identifiers: int  # rows of the table; the column `identifier` of a batch names one
    width: int | None = None  # entries of a row of the table, zeros behind them; null: embed

    def __post_init__(self):
        if problems := below_one(self, "positions", "identifiers", "width"):
            raise ValueError(*problems)


@section
class PositionMixing:
    """An MLP over the positions of a row in place of attention: for rows of one length."""

    length: int  # positions of a row, without the prefix; shorter rows are padded
    mlp: int  # hidden size

    def __post_init__(self):
        if problems := below_one(self, "length", "mlp"):
            raise ValueError(*problems)


@section
class Config:
    """A recursive reasoning model from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # blocks of a network
    h_cycles: int  # cycles of a pass, after each of which the answer state changes
    l_cycles: int  # changes of the scratch state in a cycle
    passes: int  # at most, before a row halts; evaluation and generation take all of them
    networks: int = 1  # 1: one for both states (TRM, Athena); 2: one for each (HRM)
    # last_cycle: of the last cycle of a pass; last_step: of its last two calls (HRM)
    gradient: Literal["last_cycle", "last_step"] = "last_cycle"
    mixing: PositionMixing | None = None  # MLP over positions; null: attention
    heads: int | None = None  # of attention, each of embed / heads
    kv_heads: int | None = None  # key and value heads; null: as many as heads
    bidirectional: bool = False  # attention to both sides, for targets of their own; false: causal
    theta: float | None = 1e4  # RoPE base (rope_theta elsewhere); null: no rotation
    learned: int | None = None  # learned positions: the longest row with its prefix; null: none
    # of the MLPs: swiglu, or norm_gate σ(g)·RMSNorm(g⊙v), whose outputs are bounded
    gate: Literal["swiglu", "norm_gate"] = "swiglu"
    prefix: Prefix | None = None  # positions in front of every row; null: none
    refinement: int = 0  # further calls on the answer state before it is read, in evaluation alone
    reasoning: bool = False  # a linear probe of the scratch state: a head that reads targets off it
    eps: float = 1e-5  # of the norms

    in_use: ClassVar[tuple[str, ...]] = ("passes", "refinement")

    def __post_init__(self):
        counts = ("vocab", "embed", "mlp", "layers", "h_cycles", "l_cycles", "passes")
        problems = below_one(self, *counts, "heads", "kv_heads", "learned")
        problems += [] if problems else self._problems()
        if problems:
            raise ValueError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.networks not in (1, 2):
            yield f"networks is {self.networks}; it must be 1 or 2"
        if self.refinement < 0:
            yield f"refinement is {self.refinement}; it is a count, 0 or more"
        if self.eps <= 0:
            yield f"eps is {self.eps}; it must be above 0"
        if self.theta is not None and self.theta <= 1:
            yield f"theta is {self.theta}; it must be above 1"
        if self.mixing is None:
            yield from self._of_attention()
        if self.prefix is not None and self.prefix.positions * self.embed < self.table_width:
            yield (
                f"prefix.width is {self.prefix.width}; {self.prefix.positions} positions of "
                f"{self.embed} hold up to {self.prefix.positions * self.embed}"
            )

    def _of_attention(self) -> Iterator[str]:
        if self.heads is None:
            yield "heads is required by attention; mixing: {length: .., mlp: ..} has none"
        elif self.embed % self.heads:
            yield f"heads is {self.heads}; it must divide embed ({self.embed})"
        elif self.heads % (self.kv_heads or self.heads):
            yield f"kv_heads is {self.kv_heads}; it must divide heads ({self.heads})"
        elif self.theta is not None and self.embed // self.heads % 2:
            size = self.embed // self.heads
            yield f"heads is {self.heads}, each of {size}; rotary positions need an even size"

    @property
    def causal(self) -> bool:
        """Text mode: no position sees a later one."""
        return self.mixing is None and not self.bidirectional

    @property
    def sizes(self) -> dict[str, int]:
        sizes = dict(vocab=self.vocab, embed=self.embed, mlp=self.mlp)
        if self.mixing is not None or self.heads is None:
            return sizes
        heads, kv_heads = self.heads, self.kv_heads or self.heads
        return sizes | dict(heads=heads, kv_heads=kv_heads, head_dim=self.embed // heads)

    @property
    def prefixed(self) -> int:
        """Positions in front of a row."""
        return 0 if self.prefix is None else self.prefix.positions

    @property
    def table_width(self) -> int:
        return self.embed if self.prefix is None else self.prefix.width or self.embed

    @property
    def longest(self) -> int | None:
        """Length of the longest row that there are positions for."""
        mixed = None if self.mixing is None else self.mixing.length
        learned = None if self.learned is None else self.learned - self.prefixed
        return min((n for n in (mixed, learned) if n is not None), default=None)

    @property
    def calls(self) -> int:
        """Calls of a network in all passes."""
        return self.passes * self.h_cycles * (self.l_cycles + 1) + self.refinement

    def init(self, key: PRNGKeyArray) -> "RecursiveModel":
        return RecursiveModel(self, key=key)

    def other(self, field: str) -> Any:
        given = {
            "networks": 1,
            "gradient": "last_cycle",
            "mixing": PositionMixing(length=12, mlp=20),
            "gate": "swiglu",
            "prefix": Prefix(positions=2, identifiers=3, width=40),
        }
        if field in given:
            return given[field]
        value = getattr(self, field)
        return not value if isinstance(value, bool) else 2 * value

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            vocab=96,
            embed=32,
            mlp=48,
            layers=1,
            h_cycles=2,
            l_cycles=2,
            passes=2,
            networks=2,
            gradient="last_step",
            heads=4,
            kv_heads=2,
            theta=500.0,
            learned=64,
            gate="norm_gate",
            refinement=1,
            reasoning=True,
            eps=0.5,  # cycles that contract: what generation rounds otherwise grows beyond 1e-5
        )


class PassOutput(NamedTuple):
    """Results of a pass."""

    hidden: Hidden  # of the answer, for the head
    q: Float[Array, "batch 2"]  # logits of halting and of continuing, in float32
    state: Latents
    scratch: Hidden | None  # of the scratch state, for its probe; None: there is none
    auxiliary: Report


class RecursiveModel(eqx.Module):
    """Embedding, prefix and positions; networks that think in cycles; head and q."""

    embedding: Embedding
    prefix: IdentifierPrefix | None
    positions: LearnedPositions | None
    start: InitialStates
    blocks: Stack  # the network of the scratch state, or the only one
    high_blocks: Stack | None  # that of the answer state; None: there is one network
    head: Head
    halt: Linear
    reasoning: Head | None  # the probe of the scratch state
    about: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        embedding, positions, start, low, high, head, reasoning = jax.random.split(key, 7)
        sizes, width = config.sizes, config.embed
        self.about = config
        self.embedding = Embedding(sizes, scale=self.scale, initializer=narrow, key=embedding)
        self.prefix = self.positions = self.high_blocks = self.reasoning = None
        if (prefix := config.prefix) is not None:
            shape = dict(positions=prefix.positions, embed=width)
            self.prefix = IdentifierPrefix(prefix.identifiers, config.table_width, **shape)
        if config.learned is not None:
            learned = dict(positions=config.learned, embed=width)
            self.positions = LearnedPositions(learned, initializer=narrow, key=positions)
        self.start = InitialStates(width, key=start)
        make = lambda key, layer: _block(config, key=key)  # noqa: E731
        self.blocks = stacked([make], config.layers, key=low)
        if config.networks == 2:
            self.high_blocks = stacked([make], config.layers, key=high)
        self.head = Head.init(sizes, initializer=narrow, key=head)
        q = Linear("embed", "choices", dict(embed=width, choices=2), initializer=zeros, key=head)
        self.halt = Linear.of(q.reads, q.writes, q.weight, jnp.full(2, UNLIKELY))
        if config.reasoning:
            self.reasoning = Head.init(sizes, initializer=narrow, key=reasoning)

    @property
    def scale(self) -> float:
        """Of embeddings, whose variance is 1 then, also where learned positions are added."""
        return math.sqrt(self.about.embed / (1 if self.about.learned is None else 2))

    @property
    def passes(self) -> int:
        return self.about.passes

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Hidden, Report, PyTree]:
        """All passes from fresh states. The gradient is that of the last pass."""
        if cache is not None and not self.is_cached:
            return self._recomputed(batch, cache)
        inputs, whole = self._inputs(batch)
        context = enter(whole, cache)
        past = None if cache is None else cache.layers
        cycles, refined = (None, None) if past is None else past
        network = self._cycles(inputs, context, self.about.l_cycles)
        rounds = self.passes * self.about.h_cycles
        state, left, auxiliary = network.run(self.fresh(batch), rounds, cycles)
        high, more, further = network.refined(state.high, self.about.refinement, refined)
        hidden = self._unpadded(high, batch)
        return hidden, added(auxiliary, further), context.finish((left, more))

    def think(
        self,
        batch: dict[str, Array],
        state: Latents,
        *,
        refines: bool = False,
        cycles: tuple[int, int] | None = None,
    ) -> PassOutput:
        """One pass, from the states that the last one left, or `fresh` ones.

        With `refines` the answer is read after the further calls of `refinement`. H and L cycles
        may be others than the config's.
        """
        inputs, whole = self._inputs(batch)
        h_cycles, l_cycles = cycles or (self.about.h_cycles, self.about.l_cycles)
        network = self._cycles(inputs, Packed(whole), l_cycles)
        state, _, auxiliary = network.run(state, h_cycles)
        high = state.high
        if refines:
            high, _, further = network.refined(high, self.about.refinement)
            auxiliary = added(auxiliary, further)
        q = self.halt(self._read(high, whole["document"]).astype(jnp.float32))
        hidden, state = self._unpadded(high, batch), stopped(state)
        scratch = None if self.reasoning is None else self._unpadded(state.low, batch)
        return PassOutput(hidden, q, state, scratch, auxiliary)

    def fresh(self, batch: dict[str, Array]) -> Latents:
        """The states of rows that nothing was thought about."""
        rows, length = batch["tokens"].shape
        shape = (rows, self._padded(length), self.about.embed)
        dtype = self.embedding.weight.dtype

        def spread(one: Float[Array, " embed"]) -> Array:
            whole = shard(jax.lax.stop_gradient(one).astype(dtype), ".")
            return shard(jnp.broadcast_to(whole, shape), "batch seq embed")

        return Latents(spread(self.start.high), spread(self.start.low))

    @property
    def is_cached(self) -> bool:
        """Return True if generation keeps keys and values of every call, False if it recomputes."""
        return self.prefix is None and self.about.calls <= CACHED_CALLS

    def facts(self) -> Iterator[tuple[str, str]]:
        """Sizes of the core and its tables, and how generation goes."""
        tables = (self.embedding, self.prefix, self.positions, self.head, self.reasoning)
        held, whole = _size(tables), _size(self) - _size(self.start)
        yield "core", f"{whole - held:,} parameters, beside {held:,} of tables and heads"
        config = self.about
        each = f"{config.h_cycles * (config.l_cycles + 1)} network calls × {config.passes} passes"
        if config.causal:
            how = "a KV cache for each" if self.is_cached else "every token recomputes all of them"
            yield "generation", f"{each}: {how} (at most {CACHED_CALLS} are cached)"

    def _cycles(self, inputs: States, context: Packed | DecodeContext, l_cycles: int) -> Cycles:
        upper = self.blocks if self.high_blocks is None else self.high_blocks
        cut = l_cycles - 1 if self.about.gradient == "last_step" else 0
        return Cycles(self.blocks, upper, inputs, context, l_cycles, cut)

    def _inputs(self, batch: dict[str, Array]) -> tuple[States, dict[str, Array]]:
        """Embedded inputs with prefix and padding, and the position and document of each."""
        x, position, document = (
            self.embedding(batch["tokens"]),
            batch["position"],
            batch["document"],
        )
        rows, length = position.shape
        if self.prefix is not None:
            identifier = batch.get("identifier", jnp.zeros_like(position[:, 0]))
            front = self.prefix(identifier) * jnp.asarray(self.scale, x.dtype)
            x = jnp.concatenate([front, x], axis=1)
            first = jnp.broadcast_to(
                jnp.arange(front.shape[1], dtype=jnp.int32), (rows, front.shape[1])
            )
            position = jnp.concatenate([shard(first, "batch seq"), position + front.shape[1]], 1)
            # Of the one document of the row; padding on its left is of document -1.
            own = jnp.broadcast_to(jnp.max(document, axis=1, keepdims=True), first.shape)
            document = jnp.concatenate([own, document], axis=1)
        if self.positions is not None:
            x = x + self.positions(position) * jnp.asarray(self.scale, x.dtype)
        end = ((0, 0), (0, self._padded(length) - x.shape[1]))
        if end[1][1]:
            x, position = jnp.pad(x, (*end, (0, 0))), jnp.pad(position, end)
            document = jnp.pad(document, end, constant_values=-1)
        return x, {"position": position, "document": document}

    def _padded(self, length: int) -> int:
        """Positions of the states of a row."""
        mixing = self.about.mixing
        return self.about.prefixed + (length if mixing is None else mixing.length)

    def _unpadded(self, state: States, batch: dict[str, Array]) -> Hidden:
        """Hidden states of the tokens alone."""
        first = self.about.prefixed
        return state[:, first : first + batch["tokens"].shape[1]]

    def _read(
        self, high: States, document: Int[Array, "batch positions"]
    ) -> Float[Array, "batch embed"]:
        """Input of q: the first position, or of a causal model the last, which has seen most."""
        if not self.about.causal:
            return high[:, 0]
        at = jnp.arange(document.shape[1], dtype=jnp.int32)
        last = jnp.max(jnp.where(document >= 0, at, 0), axis=1, keepdims=True)
        return jnp.sum(jnp.where((at == last)[..., None], high, jnp.zeros_like(high)), axis=1)

    def _recomputed(self, batch: dict[str, Array], cache: KVCache) -> tuple[Hidden, Report, PyTree]:
        """Generation whose cache has the tokens alone: all of them are thought about again."""
        context = DecodeContext(batch, cache)
        whole = {"document": context.slots}
        for name in ("tokens", "position"):
            old = jnp.zeros_like(cache.slots) if cache.layers is None else cache.layers[name]
            whole[name] = jax.lax.dynamic_update_slice_in_dim(
                old, batch[name].astype(old.dtype), cache.used, axis=1
            )
        hidden, auxiliary, _ = self(whole)
        length = batch["tokens"].shape[1]
        hidden = jax.lax.dynamic_slice_in_dim(hidden, cache.used, length, axis=1)
        kept = {name: whole[name] for name in ("tokens", "position")}
        return hidden, auxiliary, context.finish(kept)


def _size(tree: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def _block(config: Config, *, key: PRNGKeyArray) -> PostNormBlock:
    mixing, mlp = jax.random.split(key)
    wide = _mlp(config, config.sizes, key=mlp)
    if config.mixing is None:
        rotary = None if config.theta is None else Rotary(config.theta)
        attention = Attention(config.sizes, rotary=rotary, causal=config.causal, key=mixing)
        return PostNormBlock(attention, wide, config.eps)
    sizes = dict(embed=config.mixing.length + config.prefixed, mlp=config.mixing.mlp)
    return PostNormBlock(_mlp(config, sizes, key=mixing), wide, config.eps)


def _mlp(config: Config, sizes: dict[str, int], *, key: PRNGKeyArray) -> Gated:
    if config.gate == "swiglu":
        return Gated(sizes, key=key)
    return NormGated(sizes, eps=config.eps, key=key)
