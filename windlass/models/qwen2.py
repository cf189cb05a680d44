"""Qwen2 and Qwen2.5, dense: as Llama, with biases on queries, keys and values."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES
HUGGING_FACE = HuggingFace(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fields=llama.FIELDS,
    absent=llama.ABSENT | {"num_key_value_heads": 32},
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (True,),  # on queries, keys and values
        "use_sliding_window": (False,),
    },
    gguf="qwen2",
)


@section
class Config(llama.Transformer):
    """A Qwen2 or Qwen2.5 model from scratch."""

    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    def init(self, key: PRNGKeyArray) -> Decoder:
        return llama.decoder(self, bias=True, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**llama.TINY, scaling=llama.YARN, tied=True)
