"""The text of compiled programs: operations and bytes, loops counted as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from windlass.analysis.hlo import Text

SIDE, ROUNDS = 32, 7


def text(function, *shapes) -> Text:
    return Text(jax.jit(function).lower(*shapes).compile().as_text() or "")


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=ROUNDS)[0]

    x = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    found = text(looped, x)
    assert found.flops == ROUNDS * 2 * SIDE**3
    counted = jax.jit(looped).lower(x).compile().cost_analysis()
    assert counted is not None and counted["flops"] < found.flops  # that has the loop once


def test_of_a_stack_that_a_loop_goes_through_each_round_moves_its_own_piece():
    def looped(x, stack):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]

    shape = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    stack = jax.ShapeDtypeStruct((ROUNDS, SIDE, SIDE), jnp.float32)
    piece = SIDE * SIDE * 4
    # A round cuts its piece, multiplies, and takes the hyperbolic tangent, each from and to memory.
    assert text(looped, shape, stack).moved_bytes == pytest.approx(ROUNDS * 7 * piece, rel=0.1)


# As a TPU's compiler writes them: 14 heads of 64, each in its own place of a window.
BY_HEADS = """HloModule m

ENTRY %main (a: bf16[8,1024,896,1], b: bf16[896,14,64,1]) -> bf16[8,1024,14,64] {
  %a = bf16[8,1024,896,1]{2,1,3,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[896,14,64,1]{2,0,1,3:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[8,1024,14,64]{3,1,2,0:T(8,128)(2,1)S(1)} convolution(%a, %b), window={size=1x14 pad=0_0x13_13 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f
}
"""  # noqa: E501
CUBLAS = """HloModule m

ENTRY %main (a: bf16[4096,896], b: bf16[896,128]) -> bf16[4096,128] {
  %a = bf16[4096,896]{1,0} parameter(0)
  %b = bf16[896,128]{1,0} parameter(1)
  %c = (bf16[4096,128]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %d = bf16[4096,128]{1,0} get-tuple-element(%c), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("program", "flops"),
    [(BY_HEADS, 2 * 8 * 1024 * 896 * 14 * 64), (CUBLAS, 2 * 4096 * 896 * 128)],
    ids=["tpu", "cublas"],
)
def test_products_are_counted_however_a_compiler_writes_them(program, flops):
    assert Text(program).flops == flops


def test_what_lies_in_a_small_memory_crosses_the_large_one_on_one_side_alone():
    read = 2 * (8 * 1024 * 896 + 896 * 14 * 64)
    assert Text(BY_HEADS).moved_bytes == read


# What a TPU's compiler writes of its own reckoning: once for a loop of five, and within a fusion.
RECKONED = """HloModule m

%inside (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %q = f32[8]{0} negate(%p), backend_config={"window_config":{"estimated_cycles":"7"}}
}

%body (p: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%p.1), kind=kLoop, calls=%inside, backend_config={"window_config":{"estimated_cycles":"100"}}
}

%condition (p: f32[8]) -> pred[] {
  %p.2 = f32[8]{0} parameter(0)
  ROOT %t = pred[] constant(true)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %w = f32[8]{0} while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %n = f32[8]{0} sort(%w), backend_config={"window_config":{"estimated_cycles":"18446744073709551615"}}
  ROOT %c = f32[8]{0} copy(%w), backend_config={"window_config":{"estimated_cycles":"30"}}
}
"""  # noqa: E501


def test_cycles_count_as_often_as_loops_run_once_for_a_fusion_and_where_there_is_an_estimate():
    assert Text(RECKONED).cycles == 5 * 100 + 30


def test_a_compiler_that_reckons_no_cycles_leaves_them_unknown():
    assert Text(BY_HEADS).cycles is None
