"""Router of a mixture of experts: top-k of a softmax, in float32."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from windlass.layers.linear import Linear, LinearMap


class Router(Linear):
    """The linear map from hidden states to a logit of each expert, never cast below float32."""

    precise: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, sizes: dict[str, int], *, bias: bool, key: PRNGKeyArray):
        super().__init__("embed", "experts", sizes, bias=bias, key=key)


class Routing(NamedTuple):
    """The experts of each token, and their weights in its output."""

    probabilities: Float[Array, "batch seq experts"]  # of the softmax over all experts
    weights: Float[Array, "batch seq active"]
    experts: Int[Array, "batch seq active"]


def route(
    router: LinearMap, x: Float[Array, "batch seq embed"], active: int, *, normalized: bool
) -> Routing:
    """The `active` experts of highest probability p = softmax(x W + b), weighted by p.

    If they are `normalized`, weights are p_e / Σ p over those chosen, which is the softmax of their
    logits alone.
    """
    # A TPU multiplies float32 in bfloat16 unless it is told.
    with jax.default_matmul_precision("float32"):
        logits = router(x.astype(jnp.float32))
    probabilities = jax.nn.softmax(logits)
    weights, experts = jax.lax.top_k(probabilities, active)
    if normalized:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(probabilities, weights, experts)
