"""Mistral: as Llama, and a query may see only the last positions, its window."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES
HUGGING_FACE = HuggingFace(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=llama.FIELDS | {"window": "sliding_window"},
    absent=llama.ABSENT | {"num_key_value_heads": 8, "sliding_window": 4096},
    fixed={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    gguf="llama",
)


@section
class Config(llama.Transformer):
    """A Mistral model from scratch."""

    window: int | None = None  # sliding window, own position included; null: full causal attention
    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    def init(self, key: PRNGKeyArray) -> Decoder:
        return llama.decoder(self, window=self.window, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**llama.TINY, scaling=llama.YARN, window=5, tied=True)
