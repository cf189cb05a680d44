"""The grouped matmul of NVIDIA GPUs beside `jax.lax.ragged_dot`, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.networks.test_experts import gradients, layer, looped, states
from windlass.networks.experts import dispatch
from windlass.networks.experts import grouped_matmul as gpu
from windlass.networks.experts.layer import mixed
from windlass.networks.experts.routing import route

ROWS, READ, WRITTEN = 517, 64, 48
SIZES = {
    "uneven": [130, 0, 257, 1, 129],
    "all to one": [0, 0, 0, 517, 0],
    "rows beyond": [128, 5, 0, 1, 40],
    "none": [0, 0, 0, 0, 0],
}


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]


def both(sizes: jax.Array, x: jax.Array, weight: jax.Array, d: jax.Array) -> list:
    """Output and gradients of the kernels, and of the plain formula in float32."""

    def in_kernels(x, weight):
        return gpu.grouped_matmul(x, weight, sizes, True)

    def plain(x, weight):
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        return jax.lax.ragged_dot(x, weight, sizes).astype(jnp.bfloat16)

    def found(of):
        y, pullback = jax.vjp(of, x, weight)
        return y, *pullback(d)

    return [[np.asarray(one, np.float32) for one in found(of)] for of in (in_kernels, plain)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_outputs_and_gradients_are_those_of_the_formula(sizes):
    given = arrays((ROWS, READ), (5, READ, WRITTEN), (ROWS, WRITTEN))
    for found, expected in zip(*both(jnp.asarray(sizes, jnp.int32), *given), strict=True):
        # One rounding to 8 bits of sums that are taken in another order.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7)


def test_blocks_have_every_row_once_and_rows_of_one_expert_each():
    sizes = SIZES["rows beyond"]
    found = gpu.blocks(jnp.asarray(sizes, jnp.int32), ROWS)
    owners = np.repeat(np.arange(6), [*sizes, ROWS - sum(sizes)])
    seen = np.full(ROWS, -1)
    for expert, begin, end in zip(*map(np.asarray, found), strict=True):
        own = slice(begin, min(begin + gpu.ROWS, end))
        assert np.all(seen[own] == -1)
        seen[own] = expert
    np.testing.assert_array_equal(seen, owners)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(
        gpu, "grouped_matmul", functools.partial(gpu.grouped_matmul, interpret=True)
    )
    monkeypatch.setattr(dispatch, "on_gpu", lambda: True)


@pytest.mark.parametrize("rank", [3, 8, 16])
def test_sides_are_filled_up_to_what_tensor_cores_have(rank, interpreted):
    x, down, up = arrays((ROWS, READ), (5, READ, rank), (5, rank, WRITTEN))
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    found = gpu.ragged_dot(gpu.ragged_dot(x, down, sizes), up, sizes)
    expected = jax.lax.ragged_dot(jax.lax.ragged_dot(x, down, sizes), up, sizes)
    np.testing.assert_allclose(
        *(np.asarray(one, np.float32) for one in (found, expected)), rtol=0.05, atol=0.5
    )


def test_an_expert_layer_computes_the_same_with_them(interpreted):
    def low(experts, x, routing):
        return mixed(experts, x.astype(jnp.bfloat16), routing).astype(jnp.float32)

    own, x = layer(), states()
    program = jax.make_jaxpr(
        lambda x: low(own.experts, x, route(own.router, x, 3, normalized=True))
    )
    assert str(program(x)).count("expert_matmul") >= 3
    assert tiny.apart(gradients(low, own, x), gradients(looped, own, x)) < 0.05
