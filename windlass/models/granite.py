"""Granite, dense: as Llama, with a multiplier of embeddings, scores, branches and logits each."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Hidden, NormedBranch, Plain
from windlass.layers.rotary import Rotary
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES
MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
OWN = ("attention_bias", "mlp_bias", *MULTIPLIERS)
HUGGING_FACE = HuggingFace(
    architecture="GraniteForCausalLM",
    model_type="granite",
    fields=llama.FIELDS | {name: name for name in OWN},
    absent=llama.ABSENT
    | {"attention_bias": False, "mlp_bias": False}
    | dict.fromkeys(MULTIPLIERS, 1.0),
    fixed={"hidden_act": ("silu", "swish")},
)


@section
class Config(llama.Transformer):
    """A Granite model from scratch."""

    attention_multiplier: float  # of attention scores, in place of 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0  # of the vectors that leave the embedding
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # logits are divided by it
    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections
    mlp_bias: bool = False  # bias on the three projections of the MLP

    def __post_init__(self):
        super().__post_init__()
        for name in MULTIPLIERS:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    def init(self, key: PRNGKeyArray) -> Decoder:
        return Decoder(
            self.sizes,
            [lambda key, layer: ScaledBlock(self, key=key)],
            self.layers,
            norm=ScaledRMSNorm("embed", self.sizes, eps=self.eps, gain=1 / self.logits_scaling),
            tied=self.tied,
            embedding_scale=self.embedding_multiplier,
            key=key,
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            **llama.TINY,
            scaling=llama.YARN,
            attention_multiplier=0.4,
            embedding_multiplier=3.0,
            residual_multiplier=0.22,
            logits_scaling=0.5,
            tied=True,
            attention_bias=True,
            mlp_bias=True,
        )


class ScaledBlock(eqx.Module):
    """Attention, then a feed-forward layer, each on a normalised stream: x + m F(norm(x))."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: Gated
    attention_residual: Connection
    mlp_residual: Connection
    multiplier: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.attention_norm, self.mlp_norm = (
            RMSNorm("embed", config.sizes, eps=config.eps) for _ in range(2)
        )
        self.attention = Attention(
            config.sizes,
            rotary=Rotary(config.theta, config.pairing, config.scaling),
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            causal=config.causal,
            scale=config.attention_multiplier,
            key=attention,
        )
        self.mlp = Gated(config.sizes, bias=config.mlp_bias, key=mlp)
        self.attention_residual = self.mlp_residual = Plain()
        self.multiplier = config.residual_multiplier

    def __call__(self, x: PyTree, context) -> PyTree:
        def attended(x):
            return self._scaled(self.attention(x, context))

        def fed(x):
            return self._scaled(self.mlp(x))

        x = self.attention_residual(x, NormedBranch(self.attention_norm, attended), context)
        return self.mlp_residual(x, NormedBranch(self.mlp_norm, fed), context)

    def _scaled(self, y: Hidden) -> Hidden:
        # In float32: bfloat16 has no 0.22.
        return (y.astype(jnp.float32) * self.multiplier).astype(y.dtype)


class ScaledRMSNorm(RMSNorm):
    """RMSNorm times a constant. The logits W h / s are those of hidden states h / s."""

    gain: float = eqx.field(static=True)

    def __init__(self, over: str, sizes: dict[str, int], *, eps: float, gain: float):
        super().__init__(over, sizes, eps=eps)
        self.gain = gain

    @property
    def factor(self) -> Float[Array, "..."]:
        return self.gain * super().factor
