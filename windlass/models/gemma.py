"""Gemma 3, text: five layers that see a window to each that sees all, norms on both sides."""

import math

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.mlp import Gated
from windlass.layers.norm import OffsetRMSNorm
from windlass.layers.residual import Connection, NormedBranch, Plain
from windlass.layers.rotary import Rotary, Scaling
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.offset": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blocks.attention_norm.offset": "model.layers.{layer}.input_layernorm.weight",
    "blocks.attention.query": "model.layers.{layer}.self_attn.q_proj",
    "blocks.attention.key": "model.layers.{layer}.self_attn.k_proj",
    "blocks.attention.value": "model.layers.{layer}.self_attn.v_proj",
    "blocks.attention.output": "model.layers.{layer}.self_attn.o_proj",
    "blocks.attention.query_norm.offset": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.attention.key_norm.offset": "model.layers.{layer}.self_attn.k_norm.weight",
    "blocks.mixed_norm.offset": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.mlp_norm.offset": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "blocks.mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{layer}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{layer}.mlp.down_proj",
    "blocks.written_norm.offset": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
HUGGING_FACE = HuggingFace(
    architecture="Gemma3ForCausalLM",
    scored="Gemma3TextForSequenceClassification",
    model_type="gemma3_text",
    fields={name: key for name, key in llama.FIELDS.items() if name != "tied"}
    | {"window": "sliding_window", "query_width": "query_pre_attn_scalar"},
    absent={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    gguf="gemma3",
    by_layer=True,
)


@section
class Config(llama.Transformer):
    """A Gemma 3 text model from scratch."""

    theta: float  # RoPE base in global layers
    local_theta: float  # RoPE base in sliding-window layers
    window: int  # sliding window, own position included
    global_every: int = 6  # every n-th layer has global attention
    scaling: Scaling | None = None  # RoPE scaling in global layers
    query_width: int | None = None  # the square root divides attention scores; null: head_dim
    eps: float = 1e-6  # epsilon of the norms

    def __post_init__(self):
        super().__post_init__()
        if self.local_theta <= 1:
            raise ValueError(f"local_theta is {self.local_theta}; it must be above 1")
        if self.global_every < 1:
            raise ValueError(f"global_every is {self.global_every}; it must be 1 or more")
        if self.query_width is not None and self.query_width < 1:
            raise ValueError(f"query_width is {self.query_width}; it must be 1 or more")

    def init(self, key: PRNGKeyArray) -> Decoder:
        far = Rotary(self.theta, self.pairing, self.scaling)
        near = Rotary(self.local_theta, self.pairing)

        def local(key, layer):
            return SandwichBlock(self, near, self.window, key=key)

        def whole(key, layer):
            return SandwichBlock(self, far, None, key=key)

        return Decoder(
            self.sizes,
            [*[local] * (self.global_every - 1), whole],
            self.layers,
            norm=self.norm("embed"),
            tied=True,
            embedding_scale=math.sqrt(self.embed),
            key=key,
        )

    def norm(self, over: str) -> OffsetRMSNorm:
        return OffsetRMSNorm(over, self.sizes, eps=self.eps)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **dict(llama.TINY, layers=4),
            local_theta=50.0,
            window=4,
            global_every=2,
            scaling=Scaling(kind="linear", factor=8.0),
            query_width=14,
        )


class SandwichBlock(eqx.Module):
    """Attention, then a feed-forward layer, each between two norms."""

    attention_norm: OffsetRMSNorm
    attention: Attention
    mixed_norm: OffsetRMSNorm
    mlp_norm: OffsetRMSNorm
    mlp: Gated
    written_norm: OffsetRMSNorm
    attention_residual: Connection
    mlp_residual: Connection

    def __init__(self, config: Config, rotary: Rotary, window: int | None, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.attention_norm, self.mixed_norm = config.norm("embed"), config.norm("embed")
        self.attention = Attention(
            config.sizes,
            rotary=rotary,
            norm=config.norm,
            causal=config.causal,
            window=window,
            scale=(config.query_width or config.head_dim) ** -0.5,
            key=attention,
        )
        self.mlp_norm, self.written_norm = config.norm("embed"), config.norm("embed")
        self.mlp = Gated(config.sizes, activation=jax.nn.gelu, key=mlp)
        self.attention_residual = self.mlp_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def attended(x):
            return self.mixed_norm(self.attention(x, context))

        def fed(x):
            return self.written_norm(self.mlp(x))

        x = self.attention_residual(x, NormedBranch(self.attention_norm, attended), context)
        return self.mlp_residual(x, NormedBranch(self.mlp_norm, fed), context)
