"""Balance loss of a mixture of experts, and metrics of how its router uses them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from windlass.layers.auxiliary import over_tokens, reporting
from windlass.networks.experts.routing import Routing

BALANCE = "balance"


def report(routing: Routing) -> None:
    """Report the balance loss of a layer, E Σ_e f_e P_e, and metrics; padding counts in neither.

    f_e is the number of tokens that expert e has for each token of the batch, and P_e its mean
    probability, as in Switch Transformers; with top-k routing it is k where all are used alike.
    """
    context = reporting()
    if context is None:
        return
    is_token = context.document >= 0
    loads, tokens = _loads(routing, is_token), jnp.sum(is_token, dtype=jnp.float32)
    mean = _sums(routing.probabilities, is_token) / jnp.maximum(tokens, 1)
    experts, active = len(loads), routing.experts.shape[-1]
    context.auxiliary(BALANCE, experts * jnp.sum(jax.lax.stop_gradient(loads) * mean), tokens)
    entropy = over_tokens(_entropy(routing.probabilities), context.document)
    # 1 where all experts have as many tokens as each other.
    relative = loads * (experts / active)
    highest, dead = jnp.max(relative), tokens * jnp.sum(loads == 0, dtype=jnp.float32)
    for name in ("{}", "{}_{{layer}}"):
        context.auxiliary(name.format("router_entropy"), *entropy)
        context.auxiliary(name.format("expert_load_highest"), highest, tokens)
        context.auxiliary(name.format("dead_experts"), dead, tokens)
    for number in range(experts):
        context.auxiliary(f"expert_load_{number}", relative[number], tokens)


def _loads(routing: Routing, is_token: Bool[Array, "batch seq"]) -> Float[Array, " experts"]:
    """Tokens of each expert."""
    numbers = jnp.arange(routing.probabilities.shape[-1])
    is_chosen = jnp.any(routing.experts[..., None] == numbers, axis=-2)
    return _sums(is_chosen.astype(jnp.float32), is_token)


def _sums(
    x: Float[Array, "batch seq experts"], is_token: Bool[Array, "batch seq"]
) -> Float[Array, " experts"]:
    return jnp.sum(jnp.where(is_token[..., None], x, 0), axis=(0, 1))


def _entropy(p: Float[Array, "batch seq experts"]) -> Float[Array, "batch seq"]:
    """-Σ p log p; in nats, log E where a router has no preference."""
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
