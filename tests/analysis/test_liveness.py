"""Arrays as compilers hold them, of programs so small that they can be held in the head."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

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
        bytes_of=lambda shape, itemsize: itemsize * math.prod(shape),
        lanes=None,
        indexed=0.0,
        sums_devices_at_once=False,
        layers_per_round=1,
        unstacked=0.0,
        has_residuals=False,
        zeros_at_once=False,
    )._replace(**compiler)
    program = jax.make_jaxpr(function)(*shapes).jaxpr
    return sum(array.bytes for array in peak_buffers(program, usual))


def matrix(rows: int = SIDE) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, SIDE), jnp.float32)


def test_what_is_computed_where_it_is_used_takes_no_room():
    assert held(lambda x: jnp.tanh(x * 2 + 1), matrix()) == 0
    assert held(lambda x: jnp.sum(jnp.tanh(x)) * x, matrix()) == 4  # a sum is waited for


def test_a_part_of_an_argument_is_written_anew_in_its_buffer():
    pool = jax.ShapeDtypeStruct((3, SIDE, SIDE), jnp.float32)

    def step(pool, x, *, of):
        new = jax.lax.dynamic_update_index_in_dim(of(pool), x @ x, 1, 0)
        return jnp.where(jnp.sum(x) > 0, new, pool)  # or nothing is

    assert held(functools.partial(step, of=lambda pool: pool), pool, matrix()) == ONE + 8
    assert held(functools.partial(step, of=jnp.tanh), pool, matrix()) > 3 * ONE


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


def test_an_argument_is_written_over_as_soon_as_its_update_is_there():
    def updated(x, y, *, scale):
        one, two = x @ x, y @ y
        return x + scale(one, two) * one, y + scale(one, two) * two

    assert held(functools.partial(updated, scale=lambda *_: 2), matrix(), matrix()) == ONE

    def norm(one, two):  # waits for both
        return jnp.sum(one * one) + jnp.sum(two * two)

    assert held(functools.partial(updated, scale=norm), matrix(), matrix()) > 2 * ONE


def test_random_bits_are_held_where_a_kernel_of_its_own_draws_them():
    def dropped(x):
        return jnp.where(jax.random.bits(jax.random.key(0), x.shape) > 7, x, 0) @ x

    half, key = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16), 8
    assert held(dropped, half) == ONE // 2 + key
    assert held(dropped, half, has_random_kernel=True) == ONE + ONE // 2  # its key is gone


def test_hashed_bits_that_a_mask_is_made_of_are_held_where_random_bits_are():
    def masked(x, key):
        bits = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1) + key) * np.uint32(0x9E3779B9)
        return jnp.where(bits < np.uint32(7), x, 0) @ x

    half = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((), jnp.uint32)
    assert held(masked, half, key) == ONE // 2
    assert held(masked, half, key, has_random_kernel=True) == ONE + ONE // 2


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


def test_what_is_indexed_along_its_innermost_axis_may_be_copied():
    ids = jax.ShapeDtypeStruct((SIDE, 2), jnp.int32)

    def picked(x, ids):
        return jnp.take_along_axis(x @ x, ids, axis=-1) * 2

    def of_rows(x, ids):
        return (x @ x)[ids[:, 0]] * 2

    for copies in (0.0, 1.0, 1.5):
        more = held(picked, matrix(), ids, indexed=copies) - held(picked, matrix(), ids)
        assert more == copies * ONE
        assert held(of_rows, matrix(), ids, indexed=copies) == held(of_rows, matrix(), ids)


def on_four(function, *specs: P, **compiler) -> int:
    """The same on each of four devices."""
    mesh = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        there = [
            jax.ShapeDtypeStruct(
                (SIDE, SIDE), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
            )
            for spec in specs
        ]
        return held(function, *there, **compiler)


def test_a_slice_is_taken_at_once_as_that_frees_the_rest_of_what_each_device_computed():
    def turned(x, y):  # as the directions of an optimiser, added to weights at the end
        new = [jax.sharding.reshard(one @ one, P("fsdp")) for one in (x, y)]
        return [one + 1 for one in new]

    assert on_four(turned, P(), P()) == ONE + 2 * ONE // 4  # and not two of them

    def together(x, y):  # two under other names at once
        new = [jax.sharding.reshard(one @ one, P("fsdp")) for one in (x, y)]
        return [one + 1 for one in jax.lax.optimization_barrier(new)]

    assert on_four(together, P(), P()) == ONE + 2 * ONE // 4


def scattered_sum(whole):
    """As `devices.axes.reduce_scattered` sums the parts of devices."""
    local = functools.partial(jax.lax.psum_scatter, axis_name="fsdp", tiled=True)
    return jax.shard_map(local, in_specs=P(), out_specs=P("fsdp"))(whole)


def test_of_a_sum_over_devices_each_has_what_it_adds_and_keeps_its_slice():
    def summed(x):
        return jnp.tanh(scattered_sum(jnp.tanh(x)))

    assert on_four(summed, P()) == ONE + ONE // 4


def test_a_mask_of_which_devices_have_slices_is_computed_where_it_is_read():
    def masked(x):
        rows = jnp.arange(SIDE)
        mask = jax.sharding.reshard(rows[:, None] >= rows, P("fsdp"))
        return jnp.where(mask, x, 0) @ jnp.ones((SIDE, 1))

    def unmasked(x):
        return jnp.tanh(x) @ jnp.ones((SIDE, 1))

    assert on_four(masked, P("fsdp")) == on_four(unmasked, P("fsdp"))


def test_parts_of_a_product_that_devices_have_are_summed_before_more_is_added():
    def added(x, y, z):
        one, two = (jnp.einsum("ij,jk->ik", left, z, out_sharding=P()) for left in (x, y))
        return (one + two) @ jnp.ones((SIDE, 1))

    rows, columns = P("fsdp"), P(None, "fsdp")
    assert on_four(added, columns, columns, rows, fuses_epilogues=True) == 2 * ONE
    assert on_four(added, P(), P(), P(), fuses_epilogues=True) < 2 * ONE


def test_what_enters_a_loop_of_one_round_is_resharded_as_elsewhere():
    def looked_up(w):
        rows = jax.sharding.reshard(w, P()).at[jnp.arange(SIDE) // 2].get(out_sharding=P())
        return rows @ rows

    def in_loop(w):
        return jax.lax.scan(lambda _, one: (None, looked_up(one)), None, w[None])[1]

    for spec in (P("fsdp"), P(None, "fsdp")):  # a TPU looks up the rows of each, or gathers all
        once, looped = (on_four(one, spec, lanes=SIDE) for one in (looked_up, in_loop))
        assert looped == once + ONE // 4  # what it is cut of


def test_a_sum_over_devices_alone_may_need_no_buffer_of_its_own():
    def summed(x):
        pieces = x.reshape(4, SIDE // 4, SIDE)
        parts = jnp.einsum("gik,gjk->gij", pieces, pieces)
        return jax.sharding.reshard(jnp.sum(parts, axis=0), P("fsdp")) + 1

    part = ONE // 16
    assert on_four(summed, P("fsdp")) == 2 * part
    assert on_four(summed, P("fsdp"), sums_devices_at_once=True) == part + part // 4


def test_layers_of_one_iteration_leave_their_residuals_until_its_end():
    def stacked(x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h) @ x, h), x, length=6)[1] + 1

    alone = held(stacked, matrix(), unstacked=1.0)
    assert held(stacked, matrix(), unstacked=1.0, layers_per_round=4) == alone + ONE * 3 // 4
    assert held(stacked, matrix(), unstacked=0.5, layers_per_round=2) == alone + ONE // 4


@pytest.mark.parametrize("rows", [1, 8])
def test_memory_grows_by_what_a_row_takes(rows):
    shape = jax.ShapeDtypeStruct((rows * SIDE, SIDE), jnp.float32)
    assert held(lambda x: jnp.tanh(x @ jnp.ones((SIDE, SIDE))), shape) == (rows + 1) * ONE


def test_an_argument_that_is_indexed_in_a_loop_is_a_buffer():
    def found(values, wanted):
        return jnp.searchsorted(values, wanted)

    assert held(found, jax.ShapeDtypeStruct((64,), "int32"), jax.ShapeDtypeStruct((8,), "int32"))


def test_one_number_that_a_loop_reads_everywhere_is_made_inside_of_it():
    def step(x):
        most = jnp.broadcast_to(jnp.max(x), x.shape)
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ y) + most, None), x, length=3)[0]

    # The number itself is a buffer then.
    assert held(step, matrix()) - held(step, matrix(), lanes=128) == ONE - 4


def test_rows_that_a_loop_takes_by_turns_are_cut_out_of_where_they_lie():
    def sums(rows, *, order, read_again=False):
        turns = jnp.transpose(rows.reshape(8, 4, SIDE, SIDE), order)
        total, _ = jax.lax.scan(lambda y, x: (y + x @ x, None), jnp.zeros(turns.shape[1:]), turns)
        return total + jnp.sum(turns @ turns) if read_again else total

    rows = jax.ShapeDtypeStruct((32, SIDE, SIDE), jnp.float32)
    outer = functools.partial(sums, order=(1, 0, 2, 3))
    whole, inner = 32 * ONE, functools.partial(sums, order=(1, 0, 3, 2))
    assert held(outer, rows, lanes=128) < whole < held(outer, rows)
    assert held(inner, rows, lanes=128) > whole  # tiles are other ones
    again = functools.partial(outer, read_again=True)
    assert held(again, rows, lanes=128) == held(again, rows)


def test_a_grouped_matmul_writes_what_it_computes_and_reads_matrices_row_by_row():
    rows, experts, sizes = matrix(), (4, SIDE, SIDE // 2, 2), jax.ShapeDtypeStruct((4,), jnp.int32)
    weight = jax.ShapeDtypeStruct(experts, jnp.float32)

    def both(x, weight, sizes):
        matrices = weight.reshape(4, SIDE, SIDE)
        y = jax.lax.ragged_dot(x, matrices, sizes)
        return x + y

    assert held(both, rows, weight, sizes, fuses_epilogues=True) == ONE
    assert held(both, rows, weight, sizes, fuses_epilogues=True, lanes=128) == 5 * ONE


def test_devices_add_to_their_own_rows_of_a_table_and_look_up_their_own():
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    table = 256 * 128 * 4

    def added(x, tokens):
        zeros = jnp.zeros((256, 128), x.dtype, out_sharding=P(None, None))
        total = zeros.at[tokens].add(x, out_sharding=P(None, None))
        return jnp.tanh(jax.sharding.reshard(total, P("tensor", None))).sum()

    def looked_up(weight, tokens):
        return weight.at[tokens].get(out_sharding=P(None, None)).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        x = _shape(mesh, (64, 128), P(None, None))
        tokens = _shape(mesh, (64,), P(None), jnp.int32)
        weight = _shape(mesh, (256, 128), P("tensor", None))
        assert held(added, x, tokens) >= table
        assert held(added, x, tokens, lanes=128) < table
        assert held(looked_up, weight, tokens) >= table
        assert held(looked_up, weight, tokens, lanes=128) < table


def _shape(mesh, shape, spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
