"""What one device does in a step, against what shapes say it must."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from windlass.analysis import cost_model
from windlass.analysis.work import Work
from windlass.planning import targets, traced
from windlass.planning.memory import memory
from windlass.planning.time import model_flops

EMBED, MLP, LAYERS, HEADS, KV, DIM, VOCAB = 256, 512, 3, 8, 8, 32, 1024
ROWS, LENGTH = 16, 128


def recipe(mesh=(1, 1, 1), rank=None, dropout=0.0, length=LENGTH, vocab=VOCAB, **train):
    model = dict(family="llama", vocab=vocab, embed=EMBED, mlp=MLP, layers=LAYERS, heads=HEADS)
    model |= dict(kv_heads=KV, head_dim=DIM, theta=1e4)
    lora = {"kind": "lora", "rank": rank, "dropout": dropout}
    return {
        "model": model,
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "stories"}, "length": length},
        "optim": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": 10, "batch": ROWS, "layers_per_loop": 1} | train,
        "mesh": dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)),
    } | ({} if rank is None else {"adapter": lora})


@cache
def trace_of(on, mesh=(1, 1, 1), **options) -> traced.Traced:
    target = targets.find(on)
    return traced.trace(traced.described(recipe(mesh, **options), target), target)


@cache
def work_of(*given, **options) -> Work:
    return trace_of(*given, **options).work


LAYER = EMBED * (2 * HEADS + 2 * KV) * DIM + 3 * EMBED * MLP  # weights
TOKENS = ROWS * LENGTH


def work_parts(*given, **options) -> dict[str, float]:
    done = work_of(*given, **options).matmuls
    return {
        part: sum(one.flops * one.times for one in done if one.part == part)
        for part in ("matmuls", "head")
    }


def memory_parts(*given, **options) -> dict[str, float]:
    return memory(trace_of(*given, **options)).parts


def products(work: Work) -> float:
    return sum(one.flops * one.times for one in work.matmuls)


def test_products_are_those_that_a_model_needs_and_what_is_computed_twice():
    body, head = 2 * LAYERS * LAYER * TOKENS, 2 * EMBED * VOCAB * TOKENS
    assert products(work_of("h200", remat="none")) == 3 * body + 3 * head
    again = LAYERS * 2 * TOKENS * EMBED * MLP  # the last product of a layer is not wanted again
    assert products(work_of("h200", remat="full")) == 4 * body + 3 * head - again


def test_the_operations_of_a_step_are_those_that_a_run_counts_but_for_attention_backwards():
    found = work_of("h200", remat="none")
    attention = sum(one.flops * one.times for one in found.attention)
    needed = model_flops(trace_of("h200", remat="none").described)
    # A kernel computes the scores again, which no count of what a model needs has.
    assert found.flops - attention / 7 == pytest.approx(needed, rel=1e-6)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (2, 2, 2)])
def test_every_device_of_a_mesh_does_its_share(mesh):
    assert work_of("v5e-8", mesh).flops == pytest.approx(work_of("h200").flops / 8, rel=1e-6)


@pytest.mark.parametrize(
    "on, mesh, length", [("v5e-1", (1, 1, 1), VOCAB), ("v5e-8", (1, 1, 8), 128)]
)
def test_rows_of_as_many_places_as_there_are_words_are_no_logits(on, mesh, length):
    # On eight devices each has 128 words.
    alike, apart = ({"length": length, "vocab": vocab} for vocab in (VOCAB, VOCAB + 64))
    for of in (work_parts, memory_parts):
        same, other = of(on, mesh, **alike), of(on, mesh, **apart)
        assert same == pytest.approx(other, rel=0.1) and same.keys() == other.keys()


def test_random_numbers_are_drawn_for_the_rows_that_a_device_has():
    alone = work_of("v5e-1", rank=8, dropout=0.1, batch=2)
    together = work_of("v5e-8", (8, 1, 1), rank=8, dropout=0.1, batch=16)
    # One chip alone looks tokens up in a float32 copy of the table, so that it adds up in float32.
    copied = {"head": alone.operations["head"] - VOCAB * EMBED}
    assert together.operations == pytest.approx(alone.operations | copied, rel=1e-3)


def test_weights_in_pieces_are_gathered_for_each_pass_and_their_gradients_summed_by_pieces():
    said = work_of("v5e-8", (1, 8, 1)).collectives
    gathered = sum(one.moved * one.times for one in said if one.kind == "all-gather")
    table, norms = 2 * VOCAB * EMBED, 4 * EMBED
    layers = 2 * LAYERS * (2 * LAYER + 2 * norms)  # forward and backward, bfloat16 and float32
    # Two tables, of words and of the head, the norm before the head, and the tokens whose gradients
    # each device adds up to its own columns of the table.
    assert gathered == layers + 2 * table + norms + 4 * TOKENS
    scattered = [one for one in said if one.kind == "reduce-scatter" and one.times == LAYERS]
    assert sum(one.moved * one.times for one in scattered) == LAYERS * 2 * LAYER
    assert {one.axes for one in said} == {("fsdp",)}


def test_halves_of_a_layer_are_summed_along_the_tensor_axis_twice_each_way():
    said = work_of("v5e-8", (2, 2, 2)).collectives
    stream = [one for one in said if one.times == LAYERS and one.axes == ("tensor",)]
    # After attention and after the MLP; backwards before them, where several maps read the same.
    assert sum(one.times for one in stream) == LAYERS * (2 + 2)
    assert {one.moved for one in stream} == {2 * TOKENS // 4 * EMBED}


def test_an_adapter_moves_less_state_and_trains_as_many_products_as_reach_it():
    whole, adapted = work_of("h200"), work_of("h200", rank=4)
    assert adapted.traffic["optimiser"] < whole.traffic["optimiser"] / 10
    small = [one for one in adapted.matmuls if 4 in (one.m, one.n, one.k)]
    assert products(adapted) - sum(one.flops * one.times for one in small) < products(whole)


def test_adam_reads_and_writes_three_numbers_of_every_weight_and_the_gradient():
    state = work_of("h200").traffic["optimiser"]
    weights = LAYERS * (LAYER + 2 * EMBED) + 2 * VOCAB * EMBED + EMBED
    # Weights and two moments in and out, the gradient twice: for its norm, and to be used.
    assert state == pytest.approx(weights * (6 * 4 + 2 * 2), rel=0.2)


def test_attention_is_a_call_each_way_and_a_third_where_nothing_is_kept():
    calls = work_of("h200").attention
    assert [(one.is_backward, one.times) for one in calls] == [(False, LAYERS), (True, LAYERS)]
    assert (calls[0].batch, calls[0].length, calls[0].heads, calls[0].dim) == (
        ROWS,
        LENGTH,
        HEADS,
        DIM,
    )
    pairs = math.comb(LENGTH, 2)
    assert calls[0].flops == pytest.approx(4 * ROWS * HEADS * DIM * pairs, rel=0.02)
    assert sum(not one.is_backward for one in work_of("h200", remat="full").attention) == 2


def read(function, *shapes) -> Work:
    program = jax.make_jaxpr(function)(*shapes).jaxpr
    return cost_model.read(program, {}, vocab=None, fuses_epilogues=False)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_is_a_matmul_in_each_of_its_groups(groups):
    x = jax.ShapeDtypeStruct((8, 64, 100), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((32, 64 // groups, 5), jnp.bfloat16)
    (found,) = read(_convolve(groups), x, kernel).matmuls
    assert (found.m, found.n, found.k, found.batch) == (
        *(8 * 100, 32 // groups, 5 * 64 // groups, groups),
    )
    assert found.moved == 2 * (8 * 64 * 100 + 32 * 64 // groups * 5 + 8 * 32 * 100)


def test_a_depthwise_convolution_is_work_of_vector_units_from_and_to_memory():
    x = jax.ShapeDtypeStruct((8, 64, 100), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((64, 1, 5), jnp.bfloat16)
    found = read(_convolve(64), x, kernel)
    assert found.matmuls == []
    assert sum(found.operations.values()) == 8 * 64 * 100 * 5
    assert sum(found.traffic.values()) == 2 * (2 * 8 * 64 * 100 + 64 * 5)


def _convolve(groups):
    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups)

    return convolved


def test_the_rounds_of_a_loop_are_counted_as_often_as_they_run():
    def nested(x):
        def outer(x, _):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x), None), x, length=7)[0], None

        return jax.lax.scan(outer, x, length=3)[0]

    assert read(nested, jax.ShapeDtypeStruct((4,), jnp.float32)).rounds == 3 + 3 * 7
