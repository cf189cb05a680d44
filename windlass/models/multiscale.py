"""Multiscale transformer (MAHA): attention to tokens and to ever coarser cells of them.

The paper is https://arxiv.org/abs/2512.14925. Blocks are those of Llama but for attention: each
scale has queries and keys of its own, values are shared, and what attention to the scales gives is
summed by weights of a game, a learned convex combination or a gate.
"""

from typing import Literal

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import below_one, section
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Pairing, Rotary
from windlass.networks.decoder import Block, Decoder
from windlass.networks.multiscale.aggregation import Aggregation
from windlass.networks.multiscale.attention import MultiscaleAttention


@section
class Config:
    """A multiscale transformer from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # number of transformer blocks
    heads: int  # heads of each scale, each of embed / heads
    scales: int  # tokens, cells of `stride` tokens, cells of stride², ...
    theta: float  # RoPE base
    stride: int = 2  # inputs by which a scale is coarser than the next finer one
    # of a scale from the next finer one: a strided convolution, or the mean or maximum of a cell
    decomposition: Literal["convolution", "average_pool", "max_pool"] = "convolution"
    # inputs of a cell, the newest ones; null is stride + 1 of a convolution, and stride of others
    kernel: int | None = None
    aggregation: Aggregation | None = Aggregation()  # weights of scales; null: their mean
    # RoPE rotates entries i and i + head_dim/2 of a head together, or 2i and 2i + 1
    pairing: Pairing = "half"
    bias: bool = True  # on all projections and convolutions
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    causal = True

    def __post_init__(self):
        counts = ("vocab", "embed", "mlp", "layers", "heads")
        problems = below_one(self, *counts)
        if not problems and self.embed % (2 * self.heads):
            problems.append(
                f"embed is {self.embed}; it must be a multiple of {2 * self.heads}, as heads "
                f"({self.heads}) have an even size: {_nearest(self.embed, 2 * self.heads)} would do"
            )
        for name in ("scales", "stride"):
            if getattr(self, name) < 2:
                problems.append(f"{name} is {getattr(self, name)}; it must be 2 or more")
        if self.theta <= 1:
            problems.append(f"theta is {self.theta}; it must be above 1")
        problems += below_one(self, "kernel")
        if problems:
            raise ValueError(*problems)

    @property
    def sizes(self) -> dict[str, int]:
        named = {name: getattr(self, name) for name in ("vocab", "embed", "mlp", "heads")}
        return named | dict(head_dim=self.embed // self.heads)

    def init(self, key: PRNGKeyArray) -> Decoder:
        sizes, rotary = self.sizes, Rotary(self.theta, self.pairing)
        kernel = self.stride + (self.decomposition == "convolution")

        def norm() -> RMSNorm:
            return RMSNorm("embed", sizes, eps=self.eps)

        def attention(key: PRNGKeyArray) -> MultiscaleAttention:
            return MultiscaleAttention(
                sizes,
                scales=self.scales,
                stride=self.stride,
                decomposition=self.decomposition,
                kernel=kernel if self.kernel is None else self.kernel,
                aggregation=self.aggregation,
                rotary=rotary,
                bias=self.bias,
                key=key,
            )

        def block(key, layer):
            one, two = jax.random.split(key)
            return Block(
                attention_norm=norm(),
                attention=attention(one),
                mlp_norm=norm(),
                mlp=Gated(sizes, bias=self.bias, key=two),
            )

        return Decoder(sizes, [block], self.layers, norm=norm(), tied=self.tied, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            vocab=96,
            embed=32,
            mlp=48,
            layers=2,
            heads=4,
            scales=3,
            theta=500.0,
            stride=3,
            kernel=2,
            aggregation=Aggregation(kind="nash", temperature=0.5, iterations=2),
            pairing="interleaved",
            bias=False,
            eps=1e-3,
            tied=True,
        )


def _nearest(size: int, of: int) -> int:
    """The nearest multiple, of two the larger one."""
    return max(of, (size + of // 2) // of * of)
