"""Qwen3 with a mixture of experts in the place of each MLP."""

from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.norm import RMSNorm
from windlass.models import HuggingFace, llama, mixtral, qwen3
from windlass.networks.decoder import Decoder
from windlass.networks.experts.layer import ExpertLayer

NAMES = {ours: name for ours, name in qwen3.NAMES.items() if ".mlp." not in ours} | {
    "blocks.mlp.router": "model.layers.{layer}.mlp.gate",
    "blocks.mlp.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "blocks.mlp.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "blocks.mlp.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
}
HUGGING_FACE = HuggingFace(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields=mixtral.FIELDS
    | {
        "mlp": "moe_intermediate_size",
        "experts": "num_experts",
        "normalized": "norm_topk_prob",
        "attention_bias": "attention_bias",
    },
    absent=llama.ABSENT
    | {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    fixed={
        "hidden_act": ("silu", "swish"),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    also={"num_local_experts": "num_experts"},
)


@section
class Config(mixtral.Sparse):
    """A Qwen3 mixture of experts from scratch."""

    normalized: bool = True  # the weights of a token's experts sum to 1
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections

    def init(self, key: PRNGKeyArray) -> Decoder:
        def mlp(key: PRNGKeyArray) -> ExpertLayer:
            return mixtral.gated(self, normalized=self.normalized, key=key)

        return llama.decoder(
            self,
            mlp=mlp,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            norm=lambda over: RMSNorm(over, self.sizes, eps=self.eps),
            key=key,
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **mixtral.TINY, scaling=llama.YARN, normalized=False, tied=True, attention_bias=True
        )
