"""SmolLM3: as Llama, and every n-th layer is without rotary positions (NoPE)."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES
HUGGING_FACE = HuggingFace(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    fields=llama.FIELDS | {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    absent=llama.ABSENT
    | {
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    },
    fixed={"hidden_act": ("silu", "swish"), "use_sliding_window": (False,)},
)


@section
class Config(llama.Transformer):
    """A SmolLM3 model from scratch."""

    no_rope_every: int = 4  # every n-th layer is without RoPE
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = True  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections
    mlp_bias: bool = False  # bias on the three projections of the MLP

    def __post_init__(self):
        super().__post_init__()
        if self.no_rope_every < 1:
            raise ValueError(f"no_rope_every is {self.no_rope_every}; it must be 1 or more")

    def init(self, key: PRNGKeyArray) -> Decoder:
        return llama.decoder(
            self,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            turns=[*[{}] * (self.no_rope_every - 1), {"rotary": None}],
            key=key,
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **dict(llama.TINY, layers=5),
            scaling=llama.YARN,
            no_rope_every=2,
            tied=False,
            attention_bias=True,
            mlp_bias=True,
        )
