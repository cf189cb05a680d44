"""Arrays as compilers hold them, of programs so small that they can be held in the head."""

import jax
import jax.numpy as jnp
import pytest

from windlass.analysis.liveness import CompilerModel, peak_buffers

SIDE = 64
ONE = SIDE * SIDE * 4  # bytes of a matrix


def held(function, *shapes, **compiler) -> int:
    """Bytes that a function's own arrays take at most, the result not counted."""
    usual = CompilerModel(
        fuses_epilogues=False,
        reuses_buffers=True,
        materializes_shared=False,
        has_random_kernel=False,
        keeps_gathered=False,
        bytes_of=lambda shape, itemsize: itemsize * jnp.zeros(shape, jnp.int8).size,
    )._replace(**compiler)
    program = jax.make_jaxpr(function)(*shapes).jaxpr
    return sum(array.bytes for array in peak_buffers(program, usual))


def matrix(rows: int = SIDE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)


def test_what_is_computed_where_it_is_used_takes_no_room():
    assert held(lambda x: jnp.tanh(x * 2 + 1), matrix()) == 0
    assert held(lambda x: jnp.sum(jnp.tanh(x)) * x, matrix()) == 4  # a sum is waited for


def test_what_a_product_reads_and_gives_is_in_memory():
    assert held(lambda x: jnp.tanh(x) @ x, matrix()) == ONE
    assert held(lambda x: jnp.tanh(x @ x), matrix()) == ONE
    assert held(lambda x: (x @ x) @ (x + 1), matrix()) == 2 * ONE


def test_a_result_lies_where_what_it_was_made_of_is_no_longer_needed():
    def chain(x):
        y = x @ x
        return jnp.tanh(y) @ x

    assert held(chain, matrix()) == ONE
    assert (
        held(chain, matrix(), reuses_buffers=False) == ONE
    )  # what was read itself may be written over

    def far(x):
        y = x @ x
        return (jnp.exp(y) - jnp.tanh(y)) @ x

    assert held(far, matrix()) == ONE
    assert held(far, matrix(), reuses_buffers=False) == 2 * ONE


def test_random_bits_are_held_where_a_kernel_of_its_own_draws_them():
    def dropped(x):
        return jnp.where(jax.random.bits(jax.random.key(0), x.shape) > 7, x, 0) @ x

    half, key = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16), 8
    assert held(dropped, half) == ONE // 2 + key
    assert held(dropped, half, has_random_kernel=True) == ONE + ONE // 2  # its key is gone


def test_what_several_operations_want_may_be_computed_once_and_held():
    def shared(x):
        y = jnp.tanh(x)
        return jnp.sum(y) * (y + 1)

    assert held(shared, matrix()) == 4
    assert held(shared, matrix(), materializes_shared=True) == ONE + 4


def test_a_loop_holds_what_all_its_rounds_leave_and_what_one_round_needs():
    def stacked(x):
        def step(carry, _):
            y = carry @ carry
            return jnp.tanh(y) @ y, y

        return jax.lax.scan(step, x, None, length=5)[1].sum()

    # Five results, what goes on from round to round, and one product inside a round.
    assert held(stacked, matrix()) in (6 * ONE, 7 * ONE)


def test_a_loop_of_one_round_is_none():
    def looped(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=1)[0] + 1

    assert held(looped, matrix()) == held(lambda x: x @ x + 1, matrix()) == ONE


def test_what_is_added_to_a_product_may_be_added_while_it_is_made():
    def added(x, y):
        return jnp.tanh((x @ x) + y) @ x

    assert held(added, matrix(), matrix(), fuses_epilogues=True) == ONE
    assert held(added, matrix(), matrix()) == ONE

    def narrower(x):
        return (x @ x).astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)

    assert held(narrower, matrix(), fuses_epilogues=True) == ONE  # two halves
    assert held(narrower, matrix()) == ONE + ONE // 2


@pytest.mark.parametrize("rows", [1, 8])
def test_memory_grows_by_what_a_row_takes(rows):
    shape = jax.ShapeDtypeStruct((rows * SIDE, SIDE), jnp.float32)
    assert held(lambda x: jnp.tanh(x @ jnp.ones((SIDE, SIDE))), shape) == (rows + 1) * ONE
