"""Phi-3 and Phi-4, dense: as Llama, in whose checkpoints maps that read the same are one tensor."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.rotary import Rotary
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES | {
    "blocks.attention.query": "model.layers.{layer}.self_attn.qkv_proj[0]",
    "blocks.attention.key": "model.layers.{layer}.self_attn.qkv_proj[1]",
    "blocks.attention.value": "model.layers.{layer}.self_attn.qkv_proj[2]",
    "blocks.mlp.gate": "model.layers.{layer}.mlp.gate_up_proj[0]",
    "blocks.mlp.up": "model.layers.{layer}.mlp.gate_up_proj[1]",
}
HUGGING_FACE = HuggingFace(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    fields=llama.FIELDS | {"window": "sliding_window", "rotary_share": "partial_rotary_factor"},
    absent=llama.ABSENT
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0},
    fixed={
        "hidden_act": ("silu", "swish"),
        "resid_pdrop": (0.0,),
        "embd_pdrop": (0.0,),
    },
    gguf="phi3",
)


@section
class Config(llama.Unscaled):
    """A Phi-3 or Phi-4 model from scratch."""

    rotary_share: float = 1.0  # share of a head's entries, the first, that RoPE rotates
    window: int | None = None  # sliding window, own position included; null: full causal attention
    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    def __post_init__(self):
        super().__post_init__()
        rotated = self.rotary_share * self.head_dim
        if not 0 < self.rotary_share <= 1 or rotated < 2 or int(rotated) % 2:
            raise ValueError(
                f"rotary_share is {self.rotary_share}; it must be above 0 and at most 1, with an "
                f"even number of the {self.head_dim} entries of a head"
            )

    def init(self, key: PRNGKeyArray) -> Decoder:
        rotary = Rotary(self.theta, self.pairing, share=self.rotary_share)
        return llama.decoder(self, rotary=rotary, window=self.window, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**llama.TINY, rotary_share=0.4, window=5, tied=True)
