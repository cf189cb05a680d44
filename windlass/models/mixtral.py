"""Mixtral: as Mistral, with a mixture of experts in the place of each MLP."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder
from windlass.networks.experts.layer import ExpertLayer, GatedExperts, SharedExpert

# Of the names of a Llama model those outside of its MLPs.
NAMES = {ours: name for ours, name in llama.NAMES.items() if ".mlp." not in ours} | {
    "blocks.mlp.router": "model.layers.{layer}.block_sparse_moe.gate",
    "blocks.mlp.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "blocks.mlp.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "blocks.mlp.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}
FIELDS = llama.FIELDS | {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "balance": "router_aux_loss_coef",
}
HUGGING_FACE = HuggingFace(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields=FIELDS | {"window": "sliding_window"},
    absent=llama.ABSENT
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "router_aux_loss_coef": 0.001,
    },
    fixed={"hidden_act": ("silu", "swish"), "router_jitter_noise": (0.0,)},
)
# What the `tiny` ones have in common.
TINY: dict[str, Any] = llama.TINY | dict(mlp=12, experts=8, experts_per_token=3, balance=0.5)


@section
class Sparse(llama.Transformer):
    """Sizes and routing of every family like Mixtral."""

    mlp: int  # hidden size of an expert
    experts: int  # experts per layer
    experts_per_token: int  # experts that each token has
    balance: float = 0.001  # coefficient of the balance loss

    def __post_init__(self):
        super().__post_init__()
        check(self)

    @property
    def sizes(self) -> dict[str, int]:
        return llama.axis_sizes(self) | {"experts": self.experts}


@section
class Config(Sparse):
    """A Mixtral model from scratch."""

    window: int | None = None  # sliding window, own position included; null: full causal attention
    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding

    def init(self, key: PRNGKeyArray) -> Decoder:
        def mlp(key: PRNGKeyArray) -> ExpertLayer:
            return gated(self, normalized=True, key=key)

        return llama.decoder(self, mlp=mlp, window=self.window, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**TINY, scaling=llama.YARN, window=5, tied=True)


def check(config) -> None:
    if not 1 <= config.experts_per_token <= config.experts:
        what = f"is {config.experts_per_token}; it must be 1 to experts ({config.experts})"
        raise ValueError(f"experts_per_token {what}")
    if config.balance < 0:
        raise ValueError(f"balance is {config.balance}; it must be 0 or more")


def gated(
    config, *, normalized: bool, shared: SharedExpert | None = None, key: PRNGKeyArray
) -> ExpertLayer:
    """An expert layer of SwiGLU MLPs."""
    router, experts = jax.random.split(key)
    return ExpertLayer(
        config.sizes,
        GatedExperts(config.sizes, key=experts),
        active=config.experts_per_token,
        normalized=normalized,
        balance=config.balance,
        shared=shared,
        key=router,
    )
