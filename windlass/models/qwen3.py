"""Qwen3, dense: as Llama, with norms on each query and key."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.norm import RMSNorm
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES | {
    "blocks.attention.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.attention.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
}
HUGGING_FACE = HuggingFace(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=llama.FIELDS | {"attention_bias": "attention_bias"},
    absent=llama.ABSENT | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    fixed={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
    gguf="qwen3",
)


@section
class Config(llama.Transformer):
    """A Qwen3 model from scratch."""

    eps: float = 1e-6  # epsilon of the norms
    tied: bool = True  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections

    def init(self, key: PRNGKeyArray) -> Decoder:
        return llama.decoder(
            self,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            norm=lambda over: RMSNorm(over, self.sizes, eps=self.eps),
            key=key,
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**llama.TINY, scaling=llama.YARN, tied=False, attention_bias=True)
