"""A mixture of experts that nobody asked for: a balance loss and a metric come from its blocks."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.auxiliary import AuxiliaryLosses
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Connection, Plain
from windlass.layers.rotary import Rotary
from windlass.networks.decoder import Decoder


@section
class Config:
    """A mixture of experts from scratch, each of which reads every token."""

    vocab: int
    embed: int
    mlp: int  # the width inside each expert
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    balance: float = 0.01  # the coefficient of the balance loss
    eps: float = 1e-6  # added to the variance in every norm

    causal = True

    @property
    def sizes(self) -> dict[str, int]:
        axes = ("vocab", "embed", "mlp", "experts", "heads", "kv_heads", "head_dim")
        return {name: getattr(self, name) for name in axes}

    def init(self, key: PRNGKeyArray) -> Decoder:
        norm = RMSNorm("embed", self.sizes, eps=self.eps)
        blocks = [lambda key, layer: Block(self, key=key)]
        return Decoder(self.sizes, blocks, self.layers, norm=norm, tied=True, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        widths = dict(embed=32, mlp=20, experts=3, heads=4, kv_heads=2, head_dim=6)
        return cls(vocab=96, **widths, layers=3, theta=500.0, balance=0.5, eps=1e-3)


class Block(eqx.Module):
    attention_norm: RMSNorm
    attention: Attention
    mixture_norm: RMSNorm
    mixture: "Mixture"
    attention_residual: Connection
    mixture_residual: Connection

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mixture = jax.random.split(key)
        norm = RMSNorm("embed", config.sizes, eps=config.eps)
        self.attention_norm = self.mixture_norm = norm
        self.attention = Attention(config.sizes, rotary=Rotary(config.theta), key=attention)
        self.mixture = Mixture(config, key=mixture)
        self.attention_residual = self.mixture_residual = Plain()

    def __call__(self, x: PyTree, context) -> PyTree:
        def attended(x):
            return self.attention(self.attention_norm(x), context)

        def mixed(x):
            return self.mixture(self.mixture_norm(x), context)

        return self.mixture_residual(self.attention_residual(x, attended, context), mixed, context)


class Mixture(AuxiliaryLosses):
    """Experts, weighted by a softmax: y = Σ_e p_e down_e(silu(up_e(x))).

    Balance is measured in each row, so that it does not depend on how a batch is divided:
    E Σ_e f_e P_e, of the share of tokens f_e that expert e is first for, and its mean weight P_e.
    """

    route: Linear
    up: Linear
    down: Linear
    balance: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        route, up, down = jax.random.split(key, 3)
        self.route = Linear("embed", "experts", config.sizes, key=route)
        self.up = Linear("embed", "experts mlp", config.sizes, key=up)
        self.down = Linear("experts mlp", "embed", config.sizes, key=down)
        self.balance = config.balance

    @property
    def losses(self) -> dict[str, float]:
        return {"balance": self.balance}

    def __call__(self, x: Float[Array, "batch seq embed"], context):
        share = jax.nn.softmax(self.route(x).astype(jnp.float32))
        self._report(share, context)
        up = checkpoint_name(self.up(x), "up")
        return self.down(jax.nn.silu(up) * share[..., None].astype(up.dtype))

    def _report(self, share: Float[Array, "batch seq experts"], context) -> None:
        is_token = (context.document >= 0).astype(jnp.float32)
        tokens = jnp.sum(is_token, axis=1)
        first = (share >= jnp.max(share, axis=-1, keepdims=True)).astype(jnp.float32)
        sums = [jnp.sum(x * is_token[..., None], axis=1) for x in (first, share)]
        product = jnp.sum(sums[0] * sums[1], axis=-1) / jnp.maximum(tokens, 1)
        weight = jnp.sum(tokens)
        context.auxiliary("balance", jnp.sum(share.shape[-1] * product), weight)
        entropy = -jnp.sum(share * jnp.log(share), axis=-1) * is_token
        context.auxiliary("router_entropy", jnp.sum(entropy), weight)
        context.auxiliary("router_entropy_{layer}", jnp.sum(entropy), weight)
