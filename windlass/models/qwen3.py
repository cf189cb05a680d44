"""Qwen3, dense: as Llama, with norms on each query and key."""

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.decoder import Block, Decoder
from windlass.layers.mlp import SwiGLU
from windlass.layers.norm import RMSNorm
from windlass.models import llama

NAMES = llama.NAMES | {
    "blocks.attention.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.attention.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
}


@section
class Config:
    """A Qwen3 model from scratch."""

    vocab: int  # tokens; at least as many as the tokenizer has
    embed: int  # the width of the stream that runs through the layers
    mlp: int  # the width inside the feed-forward layers
    layers: int  # blocks, one after the other
    heads: int  # of queries, in each layer
    kv_heads: int  # of keys and values, each shared by a group of heads
    head_dim: int  # the width of a head
    theta: float  # the base of the rotary positions
    eps: float = 1e-6  # added to the variance in every norm
    tied: bool = True  # the head shares the embedding's weight
    attention_bias: bool = False  # on queries, keys, values and output

    causal = True

    def __post_init__(self):
        llama.check(self)

    @property
    def sizes(self) -> dict[str, int]:
        return llama.axis_sizes(self)

    def init(self, key: PRNGKeyArray) -> Decoder:
        def block(key):
            attention, mlp = jax.random.split(key)
            return Block(
                attention_norm=RMSNorm("embed", self.sizes, eps=self.eps),
                attention=Attention(
                    self.sizes,
                    theta=self.theta,
                    bias=self.attention_bias,
                    norm_eps=self.eps,
                    key=attention,
                ),
                mlp_norm=RMSNorm("embed", self.sizes, eps=self.eps),
                mlp=SwiGLU(self.sizes, key=mlp),
            )

        return Decoder(self.sizes, [block], self.layers, eps=self.eps, tied=self.tied, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            vocab=96,
            embed=32,
            mlp=48,
            layers=3,
            heads=4,
            kv_heads=2,
            head_dim=10,
            theta=5e4,
            eps=1e-3,
            tied=False,
            attention_bias=True,
        )
