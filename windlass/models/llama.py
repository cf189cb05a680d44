"""Llama: grouped-query attention, SwiGLU, rotary positions. SmolLM and many others are of it."""

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.decoder import Block, Decoder
from windlass.layers.mlp import SwiGLU
from windlass.layers.norm import RMSNorm

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blocks.attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "blocks.attention.query": "model.layers.{layer}.self_attn.q_proj",
    "blocks.attention.key": "model.layers.{layer}.self_attn.k_proj",
    "blocks.attention.value": "model.layers.{layer}.self_attn.v_proj",
    "blocks.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "blocks.mlp_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{layer}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{layer}.mlp.down_proj",
}


@section
class Config:
    """A Llama model from scratch."""

    vocab: int  # tokens; at least as many as the tokenizer has
    embed: int  # the width of the stream that runs through the layers
    mlp: int  # the width inside the feed-forward layers
    layers: int  # blocks, one after the other
    heads: int  # of queries, in each layer
    kv_heads: int  # of keys and values, each shared by a group of heads
    head_dim: int  # the width of a head
    theta: float  # the base of the rotary positions
    eps: float = 1e-5  # added to the variance in every norm
    tied: bool = False  # the head shares the embedding's weight
    attention_bias: bool = False  # on queries, keys, values and output
    mlp_bias: bool = False  # on all three maps of the feed-forward layers

    causal = True

    def __post_init__(self):
        check(self)

    @property
    def sizes(self) -> dict[str, int]:
        return axis_sizes(self)

    def init(self, key: PRNGKeyArray) -> Decoder:
        def block(key):
            attention, mlp = jax.random.split(key)
            return Block(
                attention_norm=RMSNorm("embed", self.sizes, eps=self.eps),
                attention=Attention(
                    self.sizes, theta=self.theta, bias=self.attention_bias, key=attention
                ),
                mlp_norm=RMSNorm("embed", self.sizes, eps=self.eps),
                mlp=SwiGLU(self.sizes, bias=self.mlp_bias, key=mlp),
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
            tied=True,
            attention_bias=True,
            mlp_bias=True,
        )


def check(config) -> None:
    for name, size in (axis_sizes(config) | {"layers": config.layers}).items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be 1 or more")
    if config.heads % config.kv_heads:
        raise ValueError(f"kv_heads is {config.kv_heads}; it must divide heads ({config.heads})")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary positions need an even one")
    if config.theta <= 0:
        raise ValueError(f"theta is {config.theta}; it must be above 0")


def axis_sizes(config) -> dict[str, int]:
    axes = ("vocab", "embed", "mlp", "heads", "kv_heads", "head_dim")
    return {name: getattr(config, name) for name in axes}
