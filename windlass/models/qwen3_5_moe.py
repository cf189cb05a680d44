"""Qwen3.5 with a mixture of experts, and one that every token has, in the place of each MLP."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.models import Multimodal, mixtral, qwen3_5, qwen3_moe
from windlass.networks.decoder import Decoder
from windlass.networks.experts.layer import ExpertLayer, SharedExpert

SHARED = "model.layers.{layer}.mlp.shared_expert"
NAMES = {ours: name for ours, name in qwen3_5.NAMES.items() if ".mlp." not in ours} | {
    **{ours: name for ours, name in qwen3_moe.NAMES.items() if ".mlp." in ours},
    "blocks.mlp.shared.gate": f"{SHARED}_gate",
    "blocks.mlp.shared.mlp.gate": f"{SHARED}.gate_proj",
    "blocks.mlp.shared.mlp.up": f"{SHARED}.up_proj",
    "blocks.mlp.shared.mlp.down": f"{SHARED}.down_proj",
}
HUGGING_FACE = qwen3_5.HUGGING_FACE._replace(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    fields={
        **qwen3_5.HUGGING_FACE.fields,
        "mlp": "moe_intermediate_size",
        "shared_mlp": "shared_expert_intermediate_size",
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "balance": "router_aux_loss_coef",
    },
    absent={
        **qwen3_5.HUGGING_FACE.absent,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    multimodal=Multimodal(
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        prefix="model.language_model.",
    ),
)


@section
class Config(qwen3_5.Hybrid):
    """A Qwen3.5 mixture of experts from scratch."""

    mlp: int  # hidden size of an expert
    shared_mlp: int  # hidden size of the expert that every token has
    experts: int  # experts per layer
    experts_per_token: int  # experts that each token has
    balance: float = 0.001  # coefficient of the balance loss

    def __post_init__(self):
        super().__post_init__()
        mixtral.check(self)
        if self.shared_mlp < 1:
            raise ValueError(f"shared_mlp is {self.shared_mlp}; it must be 1 or more")

    @property
    def sizes(self) -> dict[str, int]:
        return super().sizes | {"experts": self.experts}

    def init(self, key: PRNGKeyArray) -> Decoder:
        def mlp(key: PRNGKeyArray) -> ExpertLayer:
            routed, shared = jax.random.split(key)
            own = SharedExpert(self.sizes | {"mlp": self.shared_mlp}, key=shared)
            return mixtral.gated(self, normalized=True, shared=own, key=routed)

        return qwen3_5.decoder(self, mlp=mlp, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        sizes: dict[str, Any] = qwen3_5.TINY | {"mlp": 12}
        return cls(**sizes, shared_mlp=20, experts=8, experts_per_token=3, balance=0.5)
