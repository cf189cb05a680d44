"""Gated DeltaNet: linear attention by the gated delta rule, behind a short convolution.

    q, k, v = silu(conv(W_qkv x)),   β = σ(W_b x),   g = -exp(a) softplus(W_a x + b)
    y = W_o (RMSNorm(S q / sqrt(d)) · silu(W_z x)),   q and k of length 1, S as in `delta_rule`

A key head has as many heads of values as there are to one: their group. Channels of queries, keys
and values stand by key head, so that a device has all that its heads read.
"""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import Placed, gathered
from windlass.layers.initializers import uniform
from windlass.layers.linear import Linear
from windlass.layers.low_rank import last_output, outputs
from windlass.layers.norm import Fork, RMSNorm
from windlass.networks.delta_rule import DeltaInputs, delta_rule

Channels = Float[Array, "batch seq heads channels"]
OfValues = Float[Array, "batch seq heads group"]
EPS = 1e-6  # of the length that queries and keys are divided by
SLOWEST, FASTEST = 0.01, 16.0  # rates of decay that heads begin with


class ShortConvolution(Placed):
    """Depthwise convolution over the last inputs of the document: y_t = Σ_i w_i x_{t-i}."""

    weight: Float[Array, "*layers taps heads channels"]
    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray):
        shape = tuple(sizes[axis] for axis in ("taps", "heads", "channels"))
        self.weight = uniform(key, shape, sizes["taps"])

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return {"weight": ("taps", "heads", "channels")}

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {"weight": ((1, 2), (), (0,))}  # with an axis of the one input channel of each

    def __call__(self, x: Channels, context) -> Channels:
        weight = gathered(self.weight, self.axes["weight"]).astype(jnp.float32)
        inputs = context.last(x, len(weight))
        taps = (w * one.astype(jnp.float32) for w, one in zip(weight, inputs, strict=True))
        return sum(taps, jnp.zeros((), jnp.float32))


class DecayGate(Placed):
    """Log decay of each head of values: g = -exp(a) softplus(x + b), in float32."""

    log_rate: Float[Array, "*layers heads group"]  # a
    bias: Float[Array, "*layers heads group"]  # b
    matrices: ClassVar[tuple[str, ...]] = ()

    def __init__(self, sizes: dict[str, int], *, key: PRNGKeyArray):
        shape = sizes["heads"], sizes["group"]
        self.log_rate = jnp.log(jax.random.uniform(key, shape, minval=SLOWEST, maxval=FASTEST))
        self.bias = jnp.ones(shape)

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(("log_rate", "bias"), ("heads", "group"))

    @property
    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return dict.fromkeys(("log_rate", "bias"), ((0, 1),))

    def __call__(self, x: OfValues) -> OfValues:
        rate, bias = (gathered(one, ("heads", "group")) for one in (self.log_rate, self.bias))
        return -jnp.exp(rate) * jax.nn.softplus(x.astype(jnp.float32) + bias)


class GatedDeltaNet(eqx.Module):
    """A layer of the gated delta rule, with a gate on what it gives."""

    qkv: Linear
    gate: Linear  # z
    rate: Linear  # of writing, β
    decay: Linear
    convolution: ShortConvolution
    decay_gate: DecayGate
    norm: RMSNorm
    output: Linear
    parts: tuple[int, int, int] = eqx.field(static=True)  # channels of q, k, v of a key head
    group: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        *,
        key_heads: int,
        value_heads: int,  # a multiple of those of keys
        key_dim: int,
        value_dim: int,
        taps: int,  # inputs that the convolution reads
        eps: float,
        key: PRNGKeyArray,
    ):
        self.group = value_heads // key_heads
        self.parts = key_dim, key_dim, self.group * value_dim
        sizes = dict(embed=embed, heads=key_heads, group=self.group, taps=taps)
        sizes |= dict(value_dim=value_dim, channels=sum(self.parts))
        qkv, gate, rate, decay, convolution, decay_gate, output = jax.random.split(key, 7)
        self.qkv = Linear("embed", "heads channels", sizes, key=qkv)
        self.gate = Linear("embed", "heads group value_dim", sizes, key=gate)
        self.rate = Linear("embed", "heads group", sizes, key=rate)
        self.decay = Linear("embed", "heads group", sizes, key=decay)
        self.convolution = ShortConvolution(sizes, key=convolution)
        self.decay_gate = DecayGate(sizes, key=decay_gate)
        self.norm = RMSNorm("value_dim", sizes, eps=eps)
        self.output = Linear("heads group value_dim", "embed", sizes, key=output)

    @jax.named_scope("deltanet")
    def __call__(self, x: Float[Array, "batch seq embed"] | Fork, context):
        maps = (self.qkv, self.gate, self.rate, self.decay)
        qkv, gate, rate, decay = (checkpoint_name(y, "query") for y in outputs(maps, x))
        inputs = self.inputs(qkv, rate, decay, context)
        y = context.chunked(delta_rule, self.start(inputs), inputs)
        y = self.norm(y) * jax.nn.silu(gate.astype(jnp.float32)).astype(y.dtype)
        return last_output(self.output, y, x)

    def inputs(self, qkv: Channels, rate: OfValues, decay: OfValues, context) -> DeltaInputs:
        """Inputs of the delta rule, of what is mapped from hidden states."""
        mixed = jax.nn.silu(self.convolution(qkv, context))
        query, key, _ = self.parts
        q, k, v = jnp.split(mixed, (query, query + key), axis=-1)
        q, k = _unit(q) / math.sqrt(query), _unit(k)
        v = v.reshape(*v.shape[:-1], self.group, -1)
        return DeltaInputs(
            *(one.astype(qkv.dtype) for one in (q, k, v)),
            log_decay=self.decay_gate(decay),
            rate=jax.nn.sigmoid(rate.astype(jnp.float32)),
        )

    def start(self, inputs: DeltaInputs) -> Float[Array, "heads group key_dim value_dim"]:
        heads, group, value_dim = inputs.value.shape[2:]
        return jnp.zeros((heads, group, inputs.key.shape[-1], value_dim))


def _unit(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)
