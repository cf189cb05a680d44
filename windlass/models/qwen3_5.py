"""Qwen3.5, text: three layers of Gated DeltaNet to each of gated attention."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.mlp import Gated
from windlass.layers.norm import OffsetRMSNorm
from windlass.layers.residual import Connection, NormedBranch, Plain
from windlass.layers.rotary import Rotary, Scaling
from windlass.models import HuggingFace, Multimodal, llama
from windlass.networks.decoder import Block, Decoder
from windlass.networks.deltanet import GatedDeltaNet
from windlass.networks.gated_attention import GatedAttention

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.offset": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blocks.attention_norm.offset": "model.layers.{layer}.input_layernorm.weight",
    "blocks.delta.qkv": "model.layers.{layer}.linear_attn.in_proj_qkv",
    "blocks.delta.gate": "model.layers.{layer}.linear_attn.in_proj_z",
    "blocks.delta.rate": "model.layers.{layer}.linear_attn.in_proj_b",
    "blocks.delta.decay": "model.layers.{layer}.linear_attn.in_proj_a",
    "blocks.delta.convolution": "model.layers.{layer}.linear_attn.conv1d",
    "blocks.delta.decay_gate.log_rate": "model.layers.{layer}.linear_attn.A_log",
    "blocks.delta.decay_gate.bias": "model.layers.{layer}.linear_attn.dt_bias",
    "blocks.delta.norm.scale": "model.layers.{layer}.linear_attn.norm.weight",
    "blocks.delta.output": "model.layers.{layer}.linear_attn.out_proj",
    "blocks.attention.query": "model.layers.{layer}.self_attn.q_proj",
    "blocks.attention.key": "model.layers.{layer}.self_attn.k_proj",
    "blocks.attention.value": "model.layers.{layer}.self_attn.v_proj",
    "blocks.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "blocks.attention.query_norm.offset": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.attention.key_norm.offset": "model.layers.{layer}.self_attn.k_norm.weight",
    "blocks.mlp_norm.offset": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{layer}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{layer}.mlp.down_proj",
}
HUGGING_FACE = HuggingFace(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    fields=llama.FIELDS
    | {
        "attention_bias": "attention_bias",
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "taps": "linear_conv_kernel_dim",
        "rotary_share": "partial_rotary_factor",
    },
    absent=llama.ABSENT
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
    },
    fixed={"hidden_act": ("silu", "swish"), "attn_output_gate": (True,)},
    # A token of text has one position, whatever sections of a head images have others in.
    rope=("partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    multimodal=Multimodal(
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5",
        prefix="model.language_model.",
    ),
    beside={"model.visual.": "the vision tower", "mtp.": "multi-token prediction"},
)
# What the `tiny` ones have in common.
TINY: dict[str, Any] = llama.SIZES | dict(
    key_heads=2,
    value_heads=4,
    key_dim=6,
    value_dim=5,
    theta=500.0,
    scaling=llama.YARN,
    rotary_share=0.4,
    attention_every=2,
    taps=3,
    eps=0.1,
    tied=True,
    attention_bias=True,
)
FeedForward = Callable[[Any], Any]  # of normed hidden states, or of a fork of them


@section
class Hybrid:
    """Sizes of every family like Qwen3.5: layers of DeltaNet, and of attention in between."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # number of transformer blocks
    heads: int  # query heads of a layer of attention
    kv_heads: int  # key-value heads of a layer of attention (grouped-query attention)
    head_dim: int  # size of a head of attention
    key_heads: int  # heads of keys and queries of a layer of DeltaNet
    value_heads: int  # heads of values of a layer of DeltaNet, a multiple of key_heads
    key_dim: int  # size of a head of keys of DeltaNet
    value_dim: int  # size of a head of values of DeltaNet
    theta: float  # RoPE base
    scaling: Scaling | None = None  # RoPE scaling, for a longer context
    # share of a head's entries, the first, that RoPE rotates; elsewhere partial_rotary_factor
    rotary_share: float = 0.25
    attention_every: int = 4  # every n-th layer has attention, the others DeltaNet
    taps: int = 4  # inputs that the convolution of DeltaNet reads
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections

    causal = True

    def __post_init__(self):
        llama.check(self)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "attention_every", "taps"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"key_heads is {self.key_heads}; it must divide value_heads ({self.value_heads})"
            )
        if not 0 < self.rotary_share <= 1 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_share is {self.rotary_share}; it must be a share, above 0 and up to 1, "
                f"that makes an even number of the {self.head_dim} entries of a head"
            )

    @property
    def sizes(self) -> dict[str, int]:
        return llama.axis_sizes(self)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_share)

    def norm(self, over: str) -> OffsetRMSNorm:
        return OffsetRMSNorm(over, self.sizes, eps=self.eps)


@section
class Config(Hybrid):
    """A Qwen3.5 text model from scratch."""

    def init(self, key: PRNGKeyArray) -> Decoder:
        return decoder(self, mlp=lambda key: Gated(self.sizes, key=key), key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**TINY)


def decoder(
    config: Hybrid, *, mlp: Callable[[PRNGKeyArray], FeedForward], key: PRNGKeyArray
) -> Decoder:
    """Blocks like Qwen3.5's, each with a feed-forward layer that `mlp` makes."""

    def delta(key, layer):
        own, fed = jax.random.split(key)
        return DeltaBlock(config, mlp(fed), key=own)

    def attention(key, layer):
        own, fed = jax.random.split(key)
        return attention_block(config, mlp(fed), key=own)

    return Decoder(
        config.sizes,
        [*[delta] * (config.attention_every - 1), attention],
        config.layers,
        norm=config.norm("embed"),
        tied=config.tied,
        key=key,
    )


def attention_block(config: Hybrid, mlp: FeedForward, *, key: PRNGKeyArray) -> Block:
    """A block of gated attention, whose RoPE rotates a part of each head."""
    return Block(
        attention_norm=config.norm("embed"),
        attention=GatedAttention(
            config.sizes,
            rotary=Rotary(config.theta, scaling=config.scaling, share=config.rotary_share),
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            norm=config.norm,
            key=key,
        ),
        mlp_norm=config.norm("embed"),
        mlp=mlp,
    )


class DeltaBlock(eqx.Module):
    """Gated DeltaNet, then a feed-forward layer, each on a normalised stream."""

    attention_norm: OffsetRMSNorm
    delta: GatedDeltaNet
    mlp_norm: OffsetRMSNorm
    mlp: FeedForward
    attention_residual: Connection
    mlp_residual: Connection

    def __init__(self, config: Hybrid, mlp: FeedForward, *, key: PRNGKeyArray):
        self.attention_norm, self.mlp_norm = config.norm("embed"), config.norm("embed")
        self.delta = GatedDeltaNet(
            config.embed,
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            taps=config.taps,
            eps=config.eps,
            key=key,
        )
        self.mlp = mlp
        self.attention_residual = self.mlp_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        mixed = NormedBranch(
            self.attention_norm, lambda x: self.delta(x, context), leaves_sums=True
        )
        fed = NormedBranch(self.mlp_norm, self.mlp, leaves_sums=True)
        with jax.named_scope("residual"):
            x = self.attention_residual(x, mixed, context)
            return self.mlp_residual(x, fed, context)
