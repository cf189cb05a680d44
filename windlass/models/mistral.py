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
    window: int | None = None  # positions a query sees, its own included; null: all before it
    eps: float = 1e-5  # added to the variance in every norm
    tied: bool = False  # the head shares the embedding's weight

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
