"""GPT-OSS: experts with biases and a clamped SwiGLU, attention with sinks, windows in turn."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.config import section
from windlass.devices.axes import Placed
from windlass.layers.attention import Attention
from windlass.layers.linear import Linear, LinearMap
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.models import HuggingFace, llama, mixtral
from windlass.networks.decoder import Block, Decoder
from windlass.networks.experts.layer import ExpertLayer, Experts, side_by_side

EXPERTS = "model.layers.{layer}.mlp.experts"
NAMES = {ours: name for ours, name in llama.NAMES.items() if ".mlp." not in ours} | {
    "blocks.attention.sinks.logits": "model.layers.{layer}.self_attn.sinks",
    "blocks.mlp.router": "model.layers.{layer}.mlp.router",
    # Gate and up are in turn there, as along the last axis of one array here.
    "blocks.mlp.experts.gate_up.weight": f"{EXPERTS}.gate_up_proj",
    "blocks.mlp.experts.gate_up.bias": f"{EXPERTS}.gate_up_proj_bias",
    "blocks.mlp.experts.down.weight": f"{EXPERTS}.down_proj",
    "blocks.mlp.experts.down.bias": f"{EXPERTS}.down_proj_bias",
}
HUGGING_FACE = HuggingFace(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields=mixtral.FIELDS
    | {
        "window": "sliding_window",
        "alpha": "swiglu_alpha",
        "limit": "swiglu_limit",
        "attention_bias": "attention_bias",
    },
    absent=llama.ABSENT
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "router_aux_loss_coef": 0.001,
    },
    fixed={"hidden_act": ("silu", "swish"), "quantization_config": (None, "mxfp4")},
)


@section
class Config(mixtral.Sparse):
    """A GPT-OSS model from scratch."""

    window: int  # sliding window, own position included
    global_every: int = 2  # every n-th layer has global attention
    alpha: float = 1.702  # factor of the gate inside of its sigmoid
    limit: float = 7.0  # largest gate, and largest size of what it multiplies
    eps: float = 1e-5  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = True  # bias on the query, key, value and output projections

    sinks = True

    def __post_init__(self):
        super().__post_init__()
        if self.global_every < 1:
            raise ValueError(f"global_every is {self.global_every}; it must be 1 or more")
        if self.limit <= 0:
            raise ValueError(f"limit is {self.limit}; it must be above 0")

    def init(self, key: PRNGKeyArray) -> Decoder:
        def local(key, layer):
            return self._block(self.window, key)

        def whole(key, layer):
            return self._block(None, key)

        return Decoder(
            self.sizes,
            [*[local] * (self.global_every - 1), whole],
            self.layers,
            norm=self._norm(),
            tied=self.tied,
            key=key,
        )

    def _norm(self) -> RMSNorm:
        return RMSNorm("embed", self.sizes, eps=self.eps)

    def _block(self, window: int | None, key: PRNGKeyArray) -> Block:
        attention, router, experts = jax.random.split(key, 3)
        return Block(
            attention_norm=self._norm(),
            attention=SinkAttention(
                self.sizes,
                rotary=Rotary(self.theta, self.pairing, self.scaling),
                bias=self.attention_bias,
                output_bias=self.attention_bias,
                window=window,
                key=attention,
            ),
            mlp_norm=self._norm(),
            mlp=ExpertLayer(
                self.sizes,
                ClampedExperts(self.sizes, alpha=self.alpha, limit=self.limit, key=experts),
                active=self.experts_per_token,
                normalized=True,
                balance=self.balance,
                bias=True,
                key=router,
            ),
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **mixtral.TINY,
            scaling=llama.YARN,
            window=4,
            global_every=3,
            alpha=1.3,
            limit=3.0,
            tied=True,
            attention_bias=False,
        )


class Sinks(Placed):
    """Attention sinks: a learned logit of each head, which takes its share of every softmax."""

    logits: Float[Array, "*layers heads"]
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: dict[str, int]):
        self.logits = jnp.zeros(sizes["heads"])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"logits": ("heads",)}


class SinkAttention(Attention):
    """Attention in which a head may attend to nothing."""

    sinks: Sinks

    def __init__(self, sizes: dict[str, int], **settings: Any):
        super().__init__(sizes, **settings)
        self.sinks = Sinks(sizes)

    def how(self) -> dict[str, Any]:
        return super().how() | {"sinks": self.sinks.logits}


class ClampedExperts(Experts):
    """Gated linear units of bounded size: down_e(g σ(α g) · (u + 1)).

    g = min(gate_e(x), limit), and u is up_e(x), clamped to ± limit.
    """

    gate_up: Linear
    down: Linear
    alpha: float = eqx.field(static=True)
    limit: float = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], *, alpha: float, limit: float, key: PRNGKeyArray):
        gate_up, down = jax.random.split(key)
        both = sizes | {"pair": 2}
        self.gate_up = side_by_side("embed", "mlp pair", both, bias=True, key=gate_up)
        self.down = side_by_side("mlp", "embed", sizes, bias=True, key=down)
        self.alpha, self.limit = alpha, limit

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        return self.gate_up, self.down

    def hidden(self, gate_up: Float[Array, "rows mlp 2"]) -> Float[Array, "rows mlp"]:
        gate = jnp.minimum(gate_up[..., 0], self.limit)
        up = jnp.clip(gate_up[..., 1], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)
