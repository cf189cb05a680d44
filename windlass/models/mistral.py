"""Mistral: as Llama, and a query may see only the last positions, its window."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.decoder import Decoder
from windlass.layers.rotary import Pairing, Scaling
from windlass.models import HuggingFace, llama

NAMES = llama.NAMES
HUGGING_FACE = HuggingFace(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=llama.FIELDS | {"window": "sliding_window"},
    absent=llama.ABSENT | {"num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
)


@section
class Config:
    """A Mistral model from scratch."""

    vocab: int  # vocabulary size; at least that of the tokenizer
    embed: int  # hidden size
    mlp: int  # hidden size of the MLP
    layers: int  # number of transformer blocks
    heads: int  # query heads per layer
    kv_heads: int  # key-value heads per layer (grouped-query attention)
    head_dim: int  # size of a head
    theta: float  # RoPE base
    scaling: Scaling | None = None  # RoPE scaling, for a longer context
    # RoPE rotates entries i and i + head_dim/2 of a head together, or 2i and 2i + 1
    pairing: Pairing = "half"
    window: int | None = None  # sliding window, own position included; null: full causal attention
    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    causal = True

    def __post_init__(self):
        llama.check(self)

    @property
    def sizes(self) -> dict[str, int]:
        return llama.axis_sizes(self)

    def init(self, key: PRNGKeyArray) -> Decoder:
        return llama.decoder(self, window=self.window, key=key)

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
            window=5,
            eps=1e-3,
            tied=True,
        )
