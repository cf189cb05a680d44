"""Llama: grouped-query attention, SwiGLU, rotary positions. SmolLM and many others are of it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Pairing, Rotary, Scaling
from windlass.models import HuggingFace
from windlass.networks.decoder import Block, Decoder

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
# The keys of a config.json that all families like it have.
FIELDS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",  # null: as many as heads
    "head_dim": "head_dim",  # null: hidden size / heads
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
HUGGING_FACE = HuggingFace(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=FIELDS | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    absent=ABSENT | {"attention_bias": False, "mlp_bias": False},
    fixed={
        "hidden_act": ("silu", "swish"),
        "rope_interleaved": (False,),
        "sliding_window": (None,),
    },
    gguf="llama",
)
# What the `tiny` ones have in common.
SIZES = dict(vocab=96, embed=32, mlp=48, layers=3, heads=4, kv_heads=2, head_dim=10)
TINY: dict[str, Any] = dict(**SIZES, theta=500.0, pairing="interleaved", eps=1e-3)
YARN = Scaling(
    kind="yarn",
    factor=4.0,
    original_length=7,
    slow=0.05,
    fast=0.8,
    attention_factor=1.2,
    truncate=False,
)


@section
class Unscaled:
    """Sizes and rotary positions that every family like Llama has."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # number of transformer blocks
    heads: int  # query heads per layer
    kv_heads: int  # key-value heads per layer (grouped-query attention)
    head_dim: int  # size of a head
    theta: float  # RoPE base
    # RoPE rotates entries i and i + head_dim/2 of a head together, or 2i and 2i + 1
    pairing: Pairing = "half"

    causal = True

    def __post_init__(self):
        check(self)

    @property
    def sizes(self) -> dict[str, int]:
        return axis_sizes(self)


@section
class Transformer(Unscaled):
    """The same with RoPE scaling, which most families have."""

    scaling: Scaling | None = None  # RoPE scaling, for a longer context


@section
class Config(Transformer):
    """A Llama model from scratch."""

    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections
    mlp_bias: bool = False  # bias on the three projections of the MLP

    def init(self, key: PRNGKeyArray) -> Decoder:
        return decoder(
            self,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            key=key,
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **TINY,
            scaling=Scaling(kind="llama3", factor=4.0, original_length=7, slow=0.1, fast=0.8),
            tied=True,
            attention_bias=True,
            mlp_bias=True,
        )


def decoder(
    config,
    *,
    mlp: Callable[[PRNGKeyArray], Any] | None = None,
    mlp_bias: bool = False,
    turns: Sequence[dict[str, Any]] = ({},),
    key: PRNGKeyArray,
    **attention,
) -> Decoder:
    """Blocks like Llama's; `attention` is what a family adds to it, `turns` layers one by one.

    `mlp` makes a family's own feed-forward layer, where it is no gated MLP.
    """
    sizes = config.sizes
    attention = {
        "rotary": Rotary(config.theta, config.pairing, getattr(config, "scaling", None)),
        "causal": config.causal,
        **attention,
    }

    def norm(over: str) -> RMSNorm:
        return RMSNorm(over, sizes, eps=config.eps)

    def made(own: dict[str, Any], key: PRNGKeyArray, layer) -> Block:
        one, two = jax.random.split(key)
        return Block(
            attention_norm=norm("embed"),
            attention=Attention(sizes, **attention | own, key=one),
            mlp_norm=norm("embed"),
            mlp=mlp(two) if mlp else Gated(sizes, bias=mlp_bias, key=two),
        )

    pattern = [partial(made, own) for own in turns]
    return Decoder(sizes, pattern, config.layers, norm=norm("embed"), tied=config.tied, key=key)


def check(config) -> None:
    for name, size in (axis_sizes(config) | {"layers": config.layers}).items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be 1 or more")
    if config.heads % config.kv_heads:
        raise ValueError(f"kv_heads is {config.kv_heads}; it must divide heads ({config.heads})")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary positions need an even one")
    if config.theta <= 1:
        raise ValueError(f"theta is {config.theta}; it must be above 1")
    window = getattr(config, "window", None)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be 1 or more, a query's own position")


def axis_sizes(config) -> dict[str, int]:
    axes = ("vocab", "embed", "mlp", "heads", "kv_heads", "head_dim")
    return {name: getattr(config, name) for name in axes}
