"""The table of primitives, and matmuls and convolutions as contractions."""

import jax
import jax.numpy as jnp
import pytest

from windlass.analysis.primitives import Kind, contraction, primitive

X, TAPS = jnp.ones((2, 12, 16)), 3  # rows, features, positions


def equation(function, *arguments):
    (found,) = jax.make_jaxpr(function)(*arguments).eqns
    return found


def convolve(groups=1, stride=1, **how):
    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,), [(0, 0)], feature_group_count=groups, **how
        )

    return convolved


@pytest.mark.parametrize(
    ("how", "kernel", "shape"),
    [
        ({}, (8, 12, TAPS), (2 * 14, 8, 12 * TAPS, 1)),
        ({"groups": 4}, (8, 3, TAPS), (2 * 14, 2, 3 * TAPS, 4)),
        ({"groups": 12}, (12, 1, TAPS), (2 * 14, 1, TAPS, 12)),  # depthwise
        ({"stride": 2}, (8, 12, TAPS), (2 * 7, 8, 12 * TAPS, 1)),
    ],
)
def test_a_convolution_is_a_matmul_of_positions_by_taps_in_each_group(how, kernel, shape):
    arguments = X, jnp.ones(kernel)
    found = contraction(equation(convolve(**how), *arguments))
    assert found[:4] == shape
    assert found.is_depthwise == (how.get("groups") == 12)
    compiled = jax.jit(convolve(**how)).lower(*arguments).compile().cost_analysis()
    assert compiled is not None
    assert found.flops == pytest.approx(compiled["flops"], rel=0.01)


def test_a_convolution_of_a_dilated_input_multiplies_nothing_by_the_zeros_between():
    spread = convolve(lhs_dilation=(2,))
    found = contraction(equation(spread, X, jnp.ones((8, 12, 4))))
    assert found[:4] == (2 * (31 - 3), 8, 12 * 2, 1)


def test_the_gradients_of_a_depthwise_convolution_are_depthwise():
    kernel = jnp.ones((12, 1, TAPS))
    gradient = jax.grad(lambda *both: jnp.sum(convolve(groups=12)(*both) ** 2), (0, 1))
    equations = jax.make_jaxpr(gradient)(X, kernel).eqns
    found = [one for one in equations if primitive(one).kind is Kind.CONVOLUTION]
    assert len(found) == 3 and all(contraction(one).is_depthwise for one in found)


def test_a_matmul_by_heads_is_a_batch_of_matmuls():
    q, k = jnp.ones((5, 7, 3, 16)), jnp.ones((5, 9, 3, 16))
    numbers = (((3,), (3,)), ((0, 2), (0, 2)))
    found = contraction(equation(lambda q, k: jax.lax.dot_general(q, k, numbers), q, k))
    assert found[:4] == (7, 9, 16, 5 * 3)
    assert found.flops == 2 * 7 * 9 * 16 * 5 * 3


def test_what_is_not_in_the_table_is_a_kernel_of_its_own():
    assert primitive(equation(lambda x: jax.lax.top_k(x, 2), jnp.ones(4))).kind is Kind.OPAQUE
