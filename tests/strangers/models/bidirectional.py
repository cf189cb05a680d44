"""A bidirectional encoder, as BERT is: every token sees its whole document."""

import jax
from jaxtyping import PRNGKeyArray

from windlass.config import section
from windlass.layers.attention import Attention
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.rotary import Rotary
from windlass.networks.decoder import Block, Decoder


@section
class Config:
    """A bidirectional encoder from scratch."""

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    window: int | None = None  # positions that a token sees on each side, own one included

    causal = False

    @property
    def sizes(self) -> dict[str, int]:
        axes = ("vocab", "embed", "mlp", "heads", "kv_heads", "head_dim")
        return {name: getattr(self, name) for name in axes}

    def init(self, key: PRNGKeyArray) -> Decoder:
        norm = RMSNorm("embed", self.sizes, eps=1e-6)

        def block(key, layer):
            one, two = jax.random.split(key)
            return Block(
                attention_norm=norm,
                attention=Attention(
                    self.sizes,
                    rotary=Rotary(self.theta),
                    causal=self.causal,
                    window=self.window,
                    key=one,
                ),
                mlp_norm=norm,
                mlp=Gated(self.sizes, key=two),
            )

        return Decoder(self.sizes, [block], self.layers, norm=norm, tied=True, key=key)

    @classmethod
    def tiny(cls) -> "Config":
        widths = dict(embed=32, mlp=48, layers=2, heads=4, kv_heads=2, head_dim=10)
        return cls(vocab=96, theta=500.0, window=6, **widths)
