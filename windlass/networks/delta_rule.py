"""Gated delta rule (Gated DeltaNet): a linear recurrence that corrects what each key reads.

With keys k and queries q of a head, values v, decay α = exp(g) and rate β, the state S goes on by

    S_t = α_t S_{t-1} + β_t k_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ,   y_t = S_tᵀ q_t

In chunks of C positions it is all matmuls. With G the sums of g along a chunk, S the state before
it, and D_ij = exp(G_i - G_j) for i >= j, the positions write U (WY representation):

    U = T diag(β) (V - diag(exp G) K S),   T = (I + tril(diag(β) (K Kᵀ ∘ D), -1))⁻¹
    Y = diag(exp G) Q S + (Q Kᵀ ∘ D) U,    S' = exp(G_C) S + (diag(exp(G_C - G)) K)ᵀ U

A document begins with a state of zeros: D and exp G are zero across its beginning.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from windlass.devices.axes import layout
from windlass.layers import recurrence

CHUNK = 64  # positions
SMALL = 16  # rows up to which a matrix is inverted by sums, and beyond which by matmuls

State = Float[Array, "batch heads group key_dim value_dim"]
Outputs = Float[Array, "batch seq heads group value_dim"]


class DeltaInputs(NamedTuple):
    """Inputs of the recurrence; a key head has a group of heads of values."""

    query: Float[Array, "batch seq heads key_dim"]
    key: Float[Array, "batch seq heads key_dim"]
    value: Float[Array, "batch seq heads group value_dim"]
    log_decay: Float[Array, "batch seq heads group"]  # g, 0 or below
    rate: Float[Array, "batch seq heads group"]  # β


def delta_rule(
    state: State,
    inputs: DeltaInputs,
    *,
    begins: Bool[Array, "batch seq"],
    counts: Bool[Array, "batch seq"],
) -> tuple[State, Outputs]:
    """The state after all positions, and the output of each, every device its rows and heads.

    A document starts afresh where `begins` is true; what does not count leaves the state alone, and
    gives zeros.
    """
    # It neither reads nor writes, nor forgets.
    void = {
        name: recurrence.where(counts, x, jnp.zeros_like(x))
        for name, x in inputs._asdict().items()
        if name in ("query", "log_decay", "rate")
    }
    inputs = inputs._replace(**void)
    compute = stepwise if inputs.query.shape[1] == 1 else chunked
    return _by_heads(compute, state, inputs, begins & counts)


def stepwise(
    state: State, inputs: DeltaInputs, begins: Bool[Array, "batch seq"]
) -> tuple[State, Outputs]:
    """The recurrence as it is written, a position after the other, in float32."""

    def step(state, now):
        (q, k, v, log_decay, rate), begin = now
        state = recurrence.where(begin, jnp.zeros_like(state), state)
        state = state * jnp.exp(log_decay)[..., None, None]
        error = v - jnp.einsum("bhrde,bhd->bhre", state, k)
        state = state + jnp.einsum("bhd,bhre->bhrde", k, rate[..., None] * error)
        return state, jnp.einsum("bhrde,bhd->bhre", state, q)

    exact = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    state, y = recurrence.along_time(step, state, (exact, begins))
    return state, y.astype(inputs.value.dtype)


def chunked(
    state: State, inputs: DeltaInputs, begins: Bool[Array, "batch seq"]
) -> tuple[State, Outputs]:
    """The same by chunks: matmuls in the precision of the inputs, sums and decay in float32."""
    length, dtype = begins.shape[1], inputs.value.dtype
    size = min(CHUNK, max(SMALL, 1 << (length - 1).bit_length()))
    x, document = _in_chunks(inputs, size), jnp.cumsum(_cut(begins, size), axis=-1)
    decay = _Decay(x.log_decay, document[:, :, None, None])
    keys = _matmul("nbhid,nbhjd->nbhij", x.key, x.key)[:, :, :, None]
    lower = jnp.tril(x.rate[..., None] * keys * decay.between, -1)
    solved = unit_inverse(lower) * x.rate[..., None, :]
    value = _matmul("nbhrij,nbhrje->nbhrie", solved.astype(dtype), x.value)
    key = (solved * decay.since_start[..., None, :]).astype(dtype)
    key = _matmul("nbhrij,nbhjd->nbhrid", key, x.key).astype(dtype)

    def step(state: State, now):
        value, key, own_key, until_end, through = now
        before = state.astype(dtype)
        written = value - _matmul("bhrid,bhrde->bhrie", key, before)
        kept = (written * until_end[..., None]).astype(dtype)
        state = through[..., None, None] * state + _matmul("bhid,bhrie->bhrde", own_key, kept)
        return state, (before, written.astype(dtype))

    now = (value, key, x.key, decay.until_end, decay.since_start[..., -1])
    state, (before, written) = jax.lax.scan(step, state, now)
    scores = _matmul("nbhid,nbhjd->nbhij", x.query, x.key)[:, :, :, None] * decay.between
    y = _matmul("nbhrij,nbhrje->nbhrie", scores.astype(dtype), written)
    read = _matmul("nbhid,nbhrde->nbhrie", x.query, before)
    y = (y + decay.since_start[..., None] * read).astype(dtype)
    y = jnp.moveaxis(y, (0, 4), (1, 2))  # batch, chunks, positions, heads, group, value_dim
    return state, y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length]


class _Decay:
    """Products of decay along a chunk, in float32; zero from one document to another."""

    def __init__(self, log_decay: Float[Array, "... chunk"], document: Int[Array, "... chunk"]):
        last, here = document[..., -1:], document[..., :, None]
        is_seen = jnp.tril(here == document[..., None, :])
        # Sums within the own document alone: not even rounding is to reach the next one.
        total = jnp.sum(jnp.where(is_seen, log_decay[..., None, :], 0), axis=-1)
        # Of differences that are finite everywhere: the gradient of what is left out is 0.
        self.between = _exp(is_seen, total[..., :, None] - total[..., None, :])
        self.since_start = _exp(document == 0, total)
        self.until_end = _exp(document == last, total[..., -1:] - total)


def _exp(where: Bool[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.exp(jnp.where(where, x, -jnp.inf))


def _matmul(axes: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _in_chunks(inputs: DeltaInputs, size: int) -> DeltaInputs:
    """Inputs by chunk: [chunks, batch, heads, (group), chunk, ...]."""
    of_keys, of_values = inputs[:2], inputs[2:]
    return DeltaInputs(
        *(jnp.moveaxis(_cut(x, size), 2, 3) for x in of_keys),
        *(jnp.moveaxis(_cut(x, size), 2, 4) for x in of_values),
    )


def _cut(x: Array, size: int) -> Array:
    """Chunks of a sequence, [chunks, batch, size, ...]; zeros behind its end leave states alone."""
    missing = -x.shape[1] % size
    padded = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


@jax.custom_vjp
def unit_inverse(lower: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """(I + L)⁻¹ of a strictly lower triangular matrix, of a size that is 16 times a power of two.

    By halves, as stable as forward substitution: the powers of L that the series of the inverse is
    a sum of grow where keys are alike.

        [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]]
    """
    size = lower.shape[-1]
    if size <= SMALL:
        return _small_inverse(lower)
    half = size // 2
    first, second = slice(half), slice(half, None)
    a, d = unit_inverse(jnp.stack([lower[..., first, first], lower[..., second, second]]))
    corner = -_exact(d, _exact(lower[..., second, first], a))
    top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, d], axis=-1)], axis=-2)


def _small_inverse(lower: Float[Array, "*stack n n"]) -> Float[Array, "*stack n n"]:
    """By halves as well, of all blocks at once: X - X B X, of ever larger blocks B."""
    size, block = lower.shape[-1], 1
    at, inverse = np.arange(size), jnp.broadcast_to(jnp.eye(size), lower.shape)
    while block < size:
        pair, is_second = at // (2 * block), at // block % 2 == 1
        is_below = (pair[:, None] == pair) & is_second[:, None] & ~is_second
        corners = jnp.where(is_below, lower, 0)
        inverse = inverse - _summed(_summed(inverse, corners), inverse)
        block *= 2
    return inverse


def _summed(x: Float[Array, "*stack n n"], y: Float[Array, "*stack n n"]) -> Array:
    """Product of matrices too small for matrix units."""
    return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)


def _exact(x: Float[Array, "*stack n n"], y: Float[Array, "*stack n n"]) -> Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = unit_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, d: Array) -> tuple[Array]:
    """dL = -Tᵀ dT Tᵀ, below the diagonal."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.tril(_exact(_exact(transposed, d), transposed), -1),)


unit_inverse.defvjp(_inverse_forward, _inverse_backward)


def _by_heads(compute: Callable, state: State, inputs: DeltaInputs, begins: Array) -> Any:
    """The recurrence where each device has its own rows and heads."""
    rows = layout(("batch", "seq", "heads"), inputs.query.shape[:3])
    if rows is None:  # no mesh
        return compute(state, inputs, begins)
    batch, _, heads = rows
    states, along = PartitionSpec(batch, heads), PartitionSpec(batch, None, heads)
    own = PartitionSpec(batch)
    local = jax.shard_map(compute, in_specs=(states, along, own), out_specs=(states, along))
    state, begins = jax.sharding.reshard(state, states), jax.sharding.reshard(begins, own)
    return local(state, jax.tree.map(lambda x: jax.sharding.reshard(x, along), inputs), begins)
