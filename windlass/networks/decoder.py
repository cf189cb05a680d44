"""A causal language model: embedding, blocks, norm, head."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from windlass.devices.sketch import on_one_gpu
from windlass.layers.attention import Attention, JointAttention
from windlass.layers.auxiliary import Report
from windlass.layers.context import enter
from windlass.layers.embedding import Embedding, LookedUp
from windlass.layers.head import Head
from windlass.layers.kv_cache import KVCache
from windlass.layers.mlp import Gated
from windlass.layers.norm import Norm, divisor, has_fork
from windlass.layers.residual import Connection, Hidden, NormedBranch, Plain
from windlass.layers.stack import FoldableBlock, Maker, Stack, stacked


class Block(FoldableBlock):
    """Attention, then a feed-forward layer, each on a normalised stream."""

    attention_norm: Norm
    attention: Callable[[Hidden, Any], Hidden]  # of hidden states and a context
    mlp_norm: Norm
    mlp: Callable[[Any], Any]  # of normed hidden states, or of a fork of them
    attention_residual: Connection = Plain()
    mlp_residual: Connection = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        attended = NormedBranch(
            self.attention_norm, lambda x: self.attention(x, context), leaves_sums=True
        )
        # Other kinds of attention read hidden states, and no fork of them.
        reads_fork = isinstance(self.attention, Attention | JointAttention)
        branch = attended if reads_fork else attended.__call__
        with jax.named_scope("residual"):
            x = self.attention_residual(x, branch, context)
            fed = NormedBranch(self.mlp_norm, self.mlp, leaves_sums=True)
            return self.mlp_residual(x, fed, context)

    def folded(self, x: PyTree) -> "Block":
        """Maps behind a norm with its factor in their matrices, where one GPU computes them."""
        connections = self.attention_residual, self.mlp_residual
        if not all(type(one) is Plain for one in connections) or not has_fork(x):
            return self
        attention, mlp = self.attention, self.mlp
        if type(attention) is Attention:
            attention = attention.folded(divisor(self.attention_norm.factor), x)
        if type(mlp) is Gated:
            mlp = mlp.folded(divisor(self.mlp_norm.factor))
        return eqx.tree_at(lambda one: (one.attention, one.mlp), self, (attention, mlp))


class Decoder(eqx.Module):
    embedding: Embedding | LookedUp
    blocks: Stack
    norm: Norm
    output: Head | None  # None: the head shares the embedding's weight

    def __init__(
        self,
        sizes: dict[str, int],
        pattern: Sequence[Maker],  # of blocks, in turn
        layers: int,
        *,
        norm: Norm,  # of the stream that leaves the blocks
        tied: bool,
        embedding_scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        embedding, blocks, head = jax.random.split(key, 3)
        self.embedding = Embedding(sizes, scale=embedding_scale, key=embedding)
        self.blocks = stacked(pattern, layers, key=blocks)
        self.norm = norm
        self.output = None if tied else Head.init(sizes, key=head)

    @property
    def head(self) -> Head:
        if self.output is None:
            return Head(self.embedding.matrix)
        return self.output if self.output.tuned is None else self.output.merged()

    def looked_up(self, tokens: Int[Array, "batch seq"]) -> "Decoder":
        table, is_shared = self.embedding, type(self) is Decoder and self.output is None
        if not (isinstance(table, Embedding) and is_shared and on_one_gpu()):
            return self
        if table.tuned is not None:
            return self
        return eqx.tree_at(lambda one: one.embedding, self, LookedUp.of(table, tokens))

    def __call__(
        self, batch: dict[str, Array], cache: KVCache | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Report, PyTree]:
        context = enter(batch, cache)
        x = self.embedding(batch["tokens"])
        past = None if cache is None else cache.layers
        x, layers, auxiliary = self.blocks(x, context, past)
        return self.norm(x), auxiliary, context.finish(layers)
