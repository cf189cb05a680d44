"""OLMo 2: norms behind attention and MLP, and over all heads of queries and of keys at once."""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.kernels import spread
from windlass.layers.low_rank import outputs
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Plain
from windlass.layers.rotary import Rotary
from windlass.models import HuggingFace, llama
from windlass.networks.decoder import Decoder

NAMES = llama.NAMES | {
    "blocks.attention_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.mlp_norm.scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
    "blocks.attention.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.attention.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
}
FIELDS = llama.FIELDS | {"attention_bias": "attention_bias"}
ABSENT = llama.ABSENT | {"rms_norm_eps": 1e-5, "attention_bias": False}
HUGGING_FACE = HuggingFace(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields=FIELDS,
    absent=ABSENT,
    fixed={"hidden_act": ("silu", "swish")},
)


@section
class Config(llama.Transformer):
    """An OLMo 2 model from scratch."""

    eps: float = 1e-6  # epsilon of the norms
    tied: bool = False  # tie the output head to the embedding
    attention_bias: bool = False  # bias on the query, key, value and output projections

    def init(self, key: PRNGKeyArray) -> Decoder:
        rotary = Rotary(self.theta, self.pairing, self.scaling)
        pattern = [lambda key, layer: NormedBranchesBlock(self, rotary, key=key)]
        return Decoder(
            self.sizes, pattern, self.layers, norm=norm("embed", self), tied=self.tied, key=key
        )

    @classmethod
    def tiny(cls) -> "Config":
        return cls(**llama.TINY, scaling=llama.YARN, tied=True, attention_bias=True)


def norm(over: str, config) -> RMSNorm:
    return RMSNorm(over, config.sizes, eps=config.eps)


class NormedBranchesBlock(eqx.Module):
    """Attention, then a feed-forward layer, each before a norm: x + norm(F(x))."""

    attention: Attention
    attention_norm: RMSNorm
    mlp: Gated
    mlp_norm: RMSNorm
    attention_residual: Connection
    mlp_residual: Connection

    def __init__(self, config, rotary: Rotary, window: int | None = None, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.attention = WholeNormAttention(config, rotary, window, key=attention)
        self.mlp = Gated(config.sizes, key=mlp)
        self.attention_norm, self.mlp_norm = norm("embed", config), norm("embed", config)
        self.attention_residual = self.mlp_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def attended(x):
            return self.attention_norm(self.attention(x, context))

        def fed(x):
            return self.mlp_norm(self.mlp(x))

        x = self.attention_residual(x, attended, context)
        return self.mlp_residual(x, fed, context)


class WholeNormAttention(Attention):
    """Attention whose queries are normed over all heads together, and so are its keys."""

    def __init__(self, config, rotary: Rotary, window: int | None, *, key: PRNGKeyArray):
        super().__init__(
            config.sizes,
            rotary=rotary,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            causal=config.causal,
            window=window,
            key=key,
        )
        self.query_norm = norm("heads head_dim", config)
        self.key_norm = norm("kv_heads head_dim", config)

    @jax.named_scope("attention")
    def __call__(self, x: Float[Array, "batch seq embed"], context):
        q, k, v = outputs((self.query, self.key, self.value), x)
        q = self._normed("query", q, self.query_norm, context.position)
        # Before devices share heads: the mean is over those of all.
        k = spread(self._normed("key", k, self.key_norm, context.position))
        v = checkpoint_name(spread(v), "value")
        how = dict(causal=self.causal, window=self.window, scale=self.scale)
        return self.output(context.attend(q, k, v, **how))

    def _normed(self, name: str, x: Float[Array, "batch seq heads dim"], norm, position: Array):
        assert self.rotary is not None
        return self.rotary(norm(checkpoint_name(x, name)), position)
