from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.trained import recipe
from windlass.adapters import own
from windlass.adapters.lora import Adapter
from windlass.analysis.flops import step_flops, training_flops
from windlass.devices.axes import placements
from windlass.layers.kernels import attend
from windlass.layers.pattern import Pattern
from windlass.layers.stack import arrange
from windlass.models import qwen3
from windlass.objectives import Carry
from windlass.objectives.next_token import Objective
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting.describe import describe

# The shape of Qwen2.5-0.5B.
SIZES: dict[str, Any] = dict(
    vocab=151_936, embed=896, mlp=4864, layers=24, heads=14, kv_heads=2, head_dim=64
)
ROWS, LENGTH = 8, 2048


@pytest.fixture(scope="module")
def model():
    return eqx.filter_eval_shape(qwen3.Config(**SIZES, theta=1e6).init, jax.random.key(0))


def batch(mesh=None):
    def column(dtype):
        if mesh is None:
            return jax.ShapeDtypeStruct((ROWS, LENGTH), dtype)
        place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        return jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=place)

    whole = ("tokens", "targets", "position", "document")
    return {name: column(jnp.int32) for name in whole} | {"weight": column(jnp.float32)}


def forward_flops(function, *arguments):
    return training_flops(lambda _, *given: function(*given), None, *arguments)


def loss(model, batch):
    return Objective()(
        model, batch, key=None, carry=Carry(), helpers={}, step=jnp.int32(0), steps=1
    )[0].total


def test_training_takes_six_operations_for_each_weight_and_token_and_half_of_attention(model):
    s = SIZES
    width = s["head_dim"] * (2 * s["heads"] + 2 * s["kv_heads"])  # query, output, key, value
    in_layer = s["embed"] * (width + 3 * s["mlp"])
    matrices = s["layers"] * in_layer + s["embed"] * s["vocab"]
    seen = (LENGTH + 1) / 2  # positions a query sees, on average
    attention = s["layers"] * 2 * s["heads"] * s["head_dim"] * seen
    expected = 6 * (matrices + attention) * ROWS * LENGTH
    found = training_flops(loss, model, batch())
    assert found == pytest.approx(expected, rel=0.01)


def test_scanned_and_unrolled_layers_count_the_same():
    small = eqx.filter_eval_shape(qwen3.Config.tiny().init, jax.random.key(0))
    scanned = arrange(small, remat="saved", unroll=1)
    for other in ("none", "saved", "full"):
        unrolled = arrange(small, remat=other, unroll=99)
        assert forward_flops(loss, unrolled, batch()) == forward_flops(loss, scanned, batch())


def test_a_mesh_does_not_change_the_count(model):
    alone = forward_flops(loss, model, batch())
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            model,
            placements(model, mesh),
        )
        assert forward_flops(loss, placed, batch(mesh)) == alone


def test_with_an_adapter_the_gradients_of_frozen_matrices_are_not_counted(model):
    adapted = eqx.filter_eval_shape(
        lambda model: Adapter(rank=32).adapt(model, names={}, key=jax.random.key(0)), model
    )
    trained, frozen = eqx.partition(adapted, own(adapted))

    def of(trained, frozen, batch):
        return loss(eqx.combine(trained, frozen), batch)

    forward = forward_flops(of, trained, frozen, batch())
    # Three for attention and the adapter, two for a frozen matrix: its own gradient is not taken.
    plain = forward_flops(loss, model, batch())
    s, tokens = SIZES, ROWS * LENGTH
    attention = s["layers"] * 2 * 2 * s["heads"] * s["head_dim"] * (LENGTH + 1) / 2 * tokens
    added = forward - plain
    expected = 2 * (plain - attention) + 3 * attention + 3 * added
    found = training_flops(of, trained, frozen, batch())
    assert found == pytest.approx(expected, rel=0.01)
    assert training_flops(of, trained, frozen, batch()) < training_flops(loss, adapted, batch())


def product(x):
    return x @ x


SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ONCE = 2 * 8**3


def looped(x):
    return jax.lax.scan(lambda x, _: (product(x), None), x, length=42)[0]


def branched(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: product(product(x)), product, x)


@jax.custom_vjp
def with_own_gradient(x):
    return product(x)


with_own_gradient.defvjp(lambda x: (product(x), x), lambda x, g: (product(g),))


@jax.custom_jvp
def with_own_tangent(x):
    return product(x)


with_own_tangent.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))


@pytest.mark.parametrize(
    "function, times",
    [
        (product, 1),
        (jax.jit(product), 1),
        (jax.checkpoint(product), 1),
        (with_own_gradient, 1),
        (with_own_tangent, 1),
        (looped, 42),
        (jax.vmap(looped, in_axes=0), 42 * 8),
        (branched, 2),
        (lambda x: x + jnp.sin(x), 0),
    ],
)
def test_products_are_counted_as_often_as_they_are_used(function, times):
    argument = SQUARE
    if times == 42 * 8:
        argument = jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)
    assert forward_flops(function, argument) == times * ONCE


@pytest.mark.parametrize("axes, times", [(("data", "fsdp"), 2), (("data", "fsdp", "tensor"), 1)])
def test_shapes_inside_a_shard_map_are_those_of_one_device(axes, times):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rows, whole = PartitionSpec(axes), PartitionSpec()
    split = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    # Where rows are split over two of three axes, pairs of devices do the same work.
    assert forward_flops(split, SQUARE, SQUARE) == times * ONCE


def test_convolutions_are_counted():
    x, kernel = jnp.ones((2, 4, 10)), jnp.ones((6, 2, 3))

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2)

    # Two rows of ten positions and six features, each from three taps of two features.
    once = 2 * (2 * 10 * 6) * (3 * 2)
    assert forward_flops(convolve, x, kernel) == once
    assert training_flops(lambda kernel: convolve(x, kernel).sum(), kernel) == 2 * once
    assert training_flops(lambda both: convolve(*both).sum(), (x, kernel)) == 3 * once
    # The gradients that JAX takes are the same convolutions, turned about.
    gradients = jax.grad(lambda *both: jnp.sum(convolve(*both) ** 2), (0, 1))
    assert forward_flops(gradients, x, kernel) == 3 * once


@pytest.mark.parametrize("declared", [None, 12345])
def test_a_kernel_counts_what_it_declares_or_else_what_it_holds(declared):
    def kernel(x, out):
        out[...] = x[...] @ x[...]

    cost = None
    if declared:
        cost = pl.CostEstimate(flops=declared, bytes_accessed=0, transcendentals=0)

    def call(x):
        return pl.pallas_call(
            kernel,
            grid=(3,),
            in_specs=[pl.BlockSpec((8, 8), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((24, 8), jnp.float32),
            cost_estimate=cost,
        )(x)

    found = forward_flops(call, jax.ShapeDtypeStruct((24, 8), jnp.float32))
    assert found == (declared or 3 * ONCE)


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        (Pattern(), 64 * 64 / 2),
        (Pattern(window=16), 64 * 16 - 16 * 16 / 2),
        (Pattern(window=200), 64 * 64 / 2),
        (Pattern(causal=False), 64 * 64),
        (Pattern(stride=4), 64 * 16 / 2),
        (Pattern(causal=False, stride=4), 64 * 16),
    ],
)
def test_attention_counts_the_pairs_of_positions_it_needs_whatever_the_kernel(pattern, pairs):
    rows, heads, dim = 3, 4, 8
    lengths = [(64, heads), (64 // pattern.stride, 2), (64 // pattern.stride, 2)]
    q, k, v = (jax.ShapeDtypeStruct((rows, *each, dim), jnp.float32) for each in lengths)
    document = jax.ShapeDtypeStruct((rows, 64), jnp.int32)

    def attention(q, k, v, document):
        where = dict(document=document, slots=document[:, :: pattern.stride], first=0)
        how = dict(causal=pattern.causal, window=pattern.window, stride=pattern.stride)
        return attend(q, k, v, **where, **how)

    found = forward_flops(attention, q, k, v, document)
    assert found == 2 * 2 * rows * heads * dim * pairs  # scores, and values mixed by them


# A step of a recursion is one matmul by a trained matrix; all cycles but the last are cut off.
CYCLES = 4


def recursion(cycle):
    def loss(weight, x):
        for _ in range(CYCLES - 1):
            x = jax.lax.stop_gradient(cycle(weight, x))
        return jnp.sum(cycle(weight, x))

    return loss


def unrolled(weight, x):
    return jnp.tanh(x @ weight)


def in_loops(weight, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), x, length=3)[0]


def under_remat(weight, x):
    return jax.checkpoint(unrolled)(weight, x)


@pytest.mark.parametrize(
    ("cycle", "matmuls"),
    [
        # Four forward, and one for the weight: what goes into the last cycle is a constant.
        (unrolled, CYCLES + 1),
        (under_remat, CYCLES + 1),
        # Three in each cycle; as one body they all have both gradients, as JAX takes them.
        (in_loops, CYCLES * 3 + 2 * 3),
    ],
)
def test_where_gradients_are_cut_only_the_forward_pass_counts(cycle, matmuls):
    assert training_flops(recursion(cycle), SQUARE, SQUARE) == matmuls * ONCE
    # What JAX's own gradient multiplies, which computes the forward pass besides.
    if cycle is unrolled:
        gradient = jax.value_and_grad(recursion(cycle))
        assert forward_flops(gradient, SQUARE, SQUARE) == matmuls * ONCE


def test_a_scan_whose_rounds_are_cut_off_from_each_other_counts_each_once_backwards():
    def cut(weight, x):
        def round(x, _):
            new = x @ weight
            return jax.lax.stop_gradient(new), jnp.sum(new)

        return jnp.sum(jax.lax.scan(round, x, length=7)[1])

    assert training_flops(cut, SQUARE, SQUARE) == 7 * 2 * ONCE  # y = x w, and dw = xT dy


def test_a_teacher_and_what_is_only_reported_count_once():
    def distilled(student, teacher, x):
        targets = jnp.tanh(x @ teacher) @ teacher
        found = x @ student
        return jnp.sum(jnp.square(found - targets)), jnp.sum(found @ student)

    # The teacher twice forward, the student forward and its weight's gradient, a metric forward.
    assert training_flops(distilled, SQUARE, SQUARE, SQUARE) == (2 + 2 + 1) * ONCE


def test_what_no_result_depends_on_is_not_computed():
    assert training_flops(lambda w, x: (x @ w, jnp.sum(x))[1], SQUARE, SQUARE) == 0


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    ("quantize", "matmuls"),
    [
        (straight_through, 3),
        (jnp.round, 1),  # has no derivative
        (lambda x: x.astype(jnp.int32).astype(jnp.float32), 1),
        (lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), 3),
    ],
)
def test_a_function_may_have_a_derivative_of_its_own(quantize, matmuls):
    def loss(both):
        x, weight = map(quantize, both)
        return jnp.sum(x @ weight)

    assert training_flops(loss, (SQUARE, SQUARE)) == matmuls * ONCE


def test_a_loop_of_unknown_length_counts_as_one_round():
    def searched(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, product, x)

    assert forward_flops(searched, SQUARE) == ONCE


def flops_of_a_step(**train) -> int:
    described = describe(recipe(device={"count": 8}, train=train, by_device={"cpu": {}}))
    with described.scope():
        programs = Programs(Built(described), 10)
        return step_flops(programs, *programs.abstract_state())


def test_a_step_counts_the_same_in_microbatches_and_with_rematerialisation():
    whole = flops_of_a_step(batch=32, remat="none")
    assert flops_of_a_step(batch=32, remat="full") == whole
    assert flops_of_a_step(batch=32, accumulation=4) == whole
    assert flops_of_a_step(batch=64) == 2 * whole
