"""Hyper-connections (HC): n residual streams, mixed at every branch without constraints.

The paper is https://arxiv.org/abs/2409.19606. With x̃_j = RMSNorm(x_j) of stream j of a token,

    pre_j  = α₁ tanh(φ_pre x̃_j) + b_pre,j
    post_j = α₂ tanh(φ_post x̃_j) + b_post,j
    res_ij = α₃ tanh(φ_res,i x̃_j) + b_res,ij
    x     ← res x + postᵀ F(pre x)

It starts as x + F(x) in every stream: φ = 0, b_res = I, b_post = 1, b_pre 1 for stream l mod n in
layer l.
Nothing bounds the product of mixing matrices over layers (`residual_gain_forward`).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from windlass.config import section
from windlass.devices.axes import gathered
from windlass.layers.residual import Hidden
from windlass.residuals.mhc import (
    ALPHA,
    Coefficients,
    HyperConnection,
    HyperStreams,
    inverse_rms,
    product,
    scaled,
)


@section
class Residual(HyperStreams):
    """Unconstrained hyper-connections: the baseline of mHC."""

    def hyper_connection(self, layer: Int[Array, ""], width: int) -> HyperConnection:
        return TanhConnection(self.streams, layer, width)


class TanhConnection(HyperConnection):
    """The connection of HC, whose coefficients may have any size and sign."""

    phi: Float[Array, "*layers coefficients embed"]
    alpha: Float[Array, "*layers parts"]
    pre: Float[Array, "*layers streams"]
    post: Float[Array, "*layers streams"]
    res: Float[Array, "*layers streams streams"]

    def __init__(self, n: int, layer: Int[Array, ""], width: int):
        self.phi, self.alpha = jnp.zeros((2 + n, width)), jnp.full(3, ALPHA)
        self.pre, self.post, self.res = jax.nn.one_hot(layer % n, n), jnp.ones(n), jnp.eye(n)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        vector, matrix = ("streams",), ("streams", "streams")
        return dict(
            phi=("coefficients", "embed"), alpha=("parts",), pre=vector, post=vector, res=matrix
        )

    def coefficients(self, x: tuple[Hidden, ...]) -> Coefficients:
        n, phi = len(x), gathered(self.phi.astype(x[0].dtype), self.axes["phi"])
        products = [checkpoint_name(product(phi, one), "residual") for one in x]
        moved = [jnp.tanh(p * inverse_rms(one)) for p, one in zip(products, x, strict=True)]
        # Those of one coefficient lie side by side, as the biases do.
        moved = jnp.concatenate([one[i, None] for i in range(2 + n) for one in moved])
        biases = jnp.concatenate([self.pre, self.post, self.res.reshape(-1)])
        found = tuple(scaled(moved, self.alpha, biases, (n, n, n * n)))
        pre, post, *res = (found[start : start + n] for start in range(0, len(found), n))
        return Coefficients(pre, post, tuple(res))
