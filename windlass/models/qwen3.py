"""Qwen3, dense: as Llama, with norms on each query and key."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.decoder import Decoder
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Pairing, Scaling
from windlass.models import HuggingFace, llama

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
)


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
    scaling: Scaling | None = None  # of rotary positions, beyond those first trained with
    # what turns together in a head: entries i and i + head_dim/2, or 2i and 2i + 1
    pairing: Pairing = "half"
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
        return llama.decoder(
            self,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            norm=lambda over: RMSNorm(over, self.sizes, eps=self.eps),
            key=key,
        )

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
            theta=500.0,
            scaling=Scaling(
                kind="yarn",
                factor=4.0,
                original_length=7,
                slow=0.05,
                fast=0.8,
                attention_factor=1.2,
                truncate=False,
            ),
            pairing="interleaved",
            eps=1e-3,
            tied=False,
            attention_bias=True,
        )
