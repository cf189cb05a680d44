"""Gated MLPs (feed-forward layers): down(activation(gate(x)) · up(x))."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from windlass.devices.axes import layout, replicated
from windlass.layers.linear import Linear, can_join, joined_product
from windlass.layers.row_kernels import Columns, called, parts


class Gated(eqx.Module):
    """A gated linear unit: SwiGLU with silu, GeGLU with gelu."""

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        activation: Callable = jax.nn.silu,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed", "mlp", sizes, bias=bias, key=gate)
        self.up = Linear("embed", "mlp", sizes, bias=bias, key=up)
        self.down = Linear("mlp", "embed", sizes, bias=bias, key=down)
        self.activation = activation

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        if self._is_joined(x):
            weight = replicated(self.down.weight.astype(x.dtype))
            return swiglu_down(joined_product((self.gate, self.up), x), weight)
        gate = checkpoint_name(self.gate(x), "gate")
        up = checkpoint_name(self.up(x), "up")
        return self.output(gate, up)

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        return self.down(self.activation(gate) * up)

    def _is_joined(self, x: Float[Array, "... embed"]) -> bool:
        """Return True if it is SwiGLU without biases, whose matmuls are faster as one."""
        maps = self.gate, self.up, self.down
        is_swiglu = type(self) is Gated and self.activation is jax.nn.silu and x.ndim == 3
        return is_swiglu and can_join(maps, x) and all(one.bias is None for one in maps)


class NormGated(Gated):
    """A gated linear unit of bounded size: down(σ(gate) · RMSNorm(gate ⊙ up)), without a scale.

    With the RMS r of gate ⊙ up this is SwiGLU divided by r, after `down`: gate and up, which are
    large, are then read once.
    """

    eps: float = eqx.field(static=True)

    def __init__(self, sizes: dict[str, int], *, eps: float, key: PRNGKeyArray):
        super().__init__(sizes, key=key)
        self.eps = eps

    def output(self, gate: Float[Array, "... mlp"], up: Float[Array, "... mlp"]):
        square = jnp.square(gate.astype(jnp.float32) * up)
        scale = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + self.eps)
        return self.down(self.activation(gate) * up) * scale.astype(up.dtype)


def swiglu_down(
    gate_up: Float[Array, "batch seq twice"], down: Float[Array, "mlp embed"]
) -> Float[Array, "batch seq embed"]:
    """down(silu(gate) · up) of gate and up side by side, each device its own rows."""
    rows = layout(("batch",), gate_up.shape[:1])
    assert rows is not None  # a GPU is known by its mesh
    whole = PartitionSpec(*rows, None, None)
    local = jax.shard_map(
        _swiglu_down,
        in_specs=(whole, PartitionSpec()),
        out_specs=whole,
        check_vma=False,  # the checker does not see into kernels
    )
    return local(jax.sharding.reshard(gate_up, whole), down)


def swiglu(gate_up: Float[Array, "... twice"]) -> Float[Array, "... mlp"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu_down(gate_up: Array, down: Array, interpret: bool = False) -> Array:
    """One gradient for both matmuls: a kernel makes what each of them needs in one pass."""
    return swiglu(gate_up) @ down


def _forward(gate_up: Array, down: Array, interpret: bool):
    return swiglu(gate_up) @ down, (gate_up, down)


def _backward(interpret: bool, kept, d: Array):
    gate_up, down = kept
    d_gate_up, hidden = swiglu_backward(gate_up, d @ down.T, interpret)
    tokens = tuple(range(d.ndim - 1))
    d_down = jnp.tensordot(hidden, d, axes=(tokens, tokens))
    return d_gate_up, d_down.astype(down.dtype)


_swiglu_down.defvjp(_forward, _backward)


def swiglu_backward(
    gate_up: Float[Array, "... twice"], d: Float[Array, "... mlp"], interpret: bool = False
) -> tuple[Float[Array, "... twice"], Float[Array, "... mlp"]]:
    """Gradient of SwiGLU by gate and up, written over them, and its value.

    As both are written side by side, plain XLA would read what they depend on for each of them.
    """
    width = d.shape[-1]

    def swiglu_gradient(gate_up, d, d_gate_up, hidden):
        def one(i, _):
            part = Columns(i, width)
            gate, up, own = part.load(gate_up), part.load(gate_up, first=width), part.load(d)
            sigmoid = jax.nn.sigmoid(gate)
            silu = gate * sigmoid
            part.store(d_gate_up, own * up * (sigmoid + silu * (1 - sigmoid)))
            part.store(d_gate_up, own * silu, first=width)
            part.store(hidden, silu * up)

        jax.lax.fori_loop(0, parts(width), one, None)

    inputs = gate_up.reshape(-1, 2 * width), d.reshape(-1, width)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    found = called(swiglu_gradient, inputs, outputs, interpret, input_output_aliases={0: 0, 1: 1})
    return found[0].reshape(gate_up.shape), found[1].reshape(d.shape)
