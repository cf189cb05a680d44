"""Gated MLPs: gate and up in one matmul, whose gradient a kernel computes, equal the formula."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from windlass.devices import mesh
from windlass.layers import mlp, row_kernels
from windlass.layers.mlp import Gated, NormGated

SIZES = {"embed": 12, "mlp": 100}


@pytest.fixture
def narrow(monkeypatch):
    """Kernels that look at 64 numbers together, so that a row is several parts."""
    monkeypatch.setattr(row_kernels, "LANES", 64)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_kernel_equals_the_formula(narrow, scale):
    keys = jax.random.split(jax.random.key(0), 2)
    gate_up = scale * jax.random.normal(keys[0], (2, 3, 200))
    d = jax.random.normal(keys[1], (2, 3, 100))
    value, back = jax.vjp(mlp.swiglu, gate_up)
    found = mlp.swiglu_backward(gate_up, d, interpret=True)
    assert tiny.apart(found, (back(d)[0], value)) < 1e-6


def test_a_gated_mlp_as_a_gpu_computes_it_equals_itself(narrow, monkeypatch):
    layer = Gated(SIZES, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 12))

    def gradients():
        def loss(layer, x):
            return jnp.sum(jnp.sin(layer(x)))

        return eqx.filter_jit(jax.value_and_grad(loss, (0, 1)))(layer, x)

    kernel, calls = mlp._swiglu_down, []

    def interpreted(gate_up, down):
        calls.append(gate_up.shape)
        return kernel(gate_up, down, True)

    with jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])):
        plain = gradients()
        monkeypatch.setattr(mlp, "can_join", lambda maps, x: True)
        monkeypatch.setattr(mlp, "_swiglu_down", interpreted)
        joined = gradients()
    assert calls == [(2, 5, 200)]
    assert tiny.apart(jax.tree.leaves(joined), jax.tree.leaves(plain)) < 1e-5


@pytest.mark.parametrize(
    "layer",
    [
        Gated(SIZES, bias=True, key=jax.random.key(0)),
        Gated(SIZES, activation=jax.nn.gelu, key=jax.random.key(0)),
        NormGated(SIZES, eps=1e-6, key=jax.random.key(0)),
    ],
)
def test_what_the_kernel_does_not_compute_stays_as_it_is(layer, monkeypatch):
    monkeypatch.setattr(mlp, "can_join", lambda maps, x: True)
    assert not layer._is_joined(jnp.zeros((2, 5, 12)))


def test_maps_are_joined_for_many_tokens_on_one_gpu_alone(monkeypatch):
    layer = Gated(SIZES, key=jax.random.key(0))
    many, few = jnp.zeros((2, 2048, 12)), jnp.zeros((2, 1, 12))
    assert not layer._is_joined(many)  # a CPU
    monkeypatch.setattr("windlass.layers.linear.on_one_gpu", lambda: True)
    assert layer._is_joined(many) and not layer._is_joined(few)
