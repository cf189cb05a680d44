"""Layers in a row: what they save, and that how they are run changes nothing."""

import dataclasses
import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from tests.strangers.models import gru
from windlass.devices import mesh
from windlass.devices.axes import cast
from windlass.layers import stack as layers_stack
from windlass.layers.attention import Attention
from windlass.layers.context import Packed
from windlass.layers.kv_cache import DecodeContext, KVCache
from windlass.layers.mlp import Gated
from windlass.layers.norm import RMSNorm
from windlass.layers.residual import Streams
from windlass.layers.rotary import Rotary
from windlass.layers.stack import arrange, by_layer, stacked
from windlass.models import llama
from windlass.networks.decoder import Block

# The shape of Qwen2.5-0.5B, but for its depth and its vocabulary.
SHAPE = llama.Config(
    vocab=512,
    embed=896,
    mlp=4864,
    layers=2,
    heads=14,
    kv_heads=2,
    head_dim=64,
    theta=1e6,
    tied=True,
)


def saved_bytes(layers: int, rows: int, remat: str, unroll: int) -> int:
    """What the backward pass of a model in bfloat16 is given by the forward pass."""
    config = dataclasses.replace(SHAPE, layers=layers)

    def backward(key, tokens):
        model = arrange(cast(config.init(key), "bfloat16"), remat=remat, unroll=unroll)
        weights, static = eqx.partition(model, eqx.is_array)
        columns = {"position": tokens, "document": tokens, "tokens": tokens}
        return jax.vjp(lambda x: eqx.combine(x, static)(columns)[0], weights)[1]

    tokens = jax.ShapeDtypeStruct((rows, 1024), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes types
        residuals = jax.eval_shape(backward, jax.random.key(0), tokens)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))


@pytest.mark.parametrize("unroll", [1, 6])
@pytest.mark.parametrize(
    ("remat", "least", "most"),
    [("saved", 25_000, 29_000), ("full", 1_700, 1_900), ("none", 60_000, 1_000_000)],
)
def test_a_layer_saves_for_each_token_what_its_policy_says(remat, least, most, unroll):
    # A difference of differences: what a token adds in two more layers, without the weights.
    more, fewer = (
        saved_bytes(layers, 2, remat, unroll) - saved_bytes(layers, 1, remat, unroll)
        for layers in (6, 4)
    )
    each = (more - fewer) / 2 / 1024
    print(f"{remat}, unroll {unroll}: {each:,.0f} bytes a token and layer")
    assert least < each < most


SIZES = dict(embed=16, heads=2, kv_heads=1, head_dim=6, mlp=20)


def attending(key, layer):
    one, two = jax.random.split(key)
    return Block(
        attention_norm=RMSNorm("embed", SIZES, eps=1e-3),
        attention=Attention(SIZES, rotary=Rotary(100.0), key=one),
        mlp_norm=RMSNorm("embed", SIZES, eps=1e-3),
        mlp=Gated(SIZES, key=two),
    )


def recurring(key, layer):
    return gru.Unit(gru.Config(vocab=1, embed=16, state=10, layers=1), key=key)


@functools.cache
def example(kinds: int):
    """Five layers, of one kind or of two in turn; a stream; and where its tokens stand."""
    stack = stacked([attending, recurring][:kinds], 5, key=jax.random.key(0))
    batch = tiny.packed([tiny.documents(9, lengths) for lengths in ([9], [4, 6])], 8)
    return stack, jax.random.normal(jax.random.key(1), (2, 8, 16)), batch


def gradient(run, weights, x):
    """Of a number that depends on all of the stream."""
    return jax.jit(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(run(w, x))), (0, 1)))(weights, x)


@functools.cache
def by_hand(kinds: int):
    stack, x, batch = example(kinds)
    weights, static = eqx.partition(stack, eqx.is_array)

    def run(weights, x):
        for i in range(5):
            layer = jax.tree.map(operator.itemgetter(i // kinds), weights.kinds[i % kinds])
            own = eqx.combine(layer, static.kinds[i % kinds])
            x = own(x, Packed(batch))
        return x

    return gradient(run, weights, x)


@pytest.mark.parametrize(
    ("kinds", "remat", "unroll"),
    [
        pytest.param(1, "none", 1, marks=pytest.mark.long),
        pytest.param(1, "saved", 2, marks=pytest.mark.long),
        pytest.param(2, "full", 5, marks=pytest.mark.long),
        (1, "full", 5),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(1, "saved", 1), (1, "full", 1), (2, "saved", 1)]
        ),
    ],
)
def test_policies_and_unrolling_change_no_gradient(kinds, remat, unroll):
    stack, x, batch = example(kinds)
    weights, static = eqx.partition(arrange(stack, remat=remat, unroll=unroll), eqx.is_array)
    found = gradient(lambda w, x: eqx.combine(w, static)(x, Packed(batch))[0], weights, x)
    assert tiny.apart(jax.tree.leaves(found), jax.tree.leaves(by_hand(kinds))) < 1e-5


@pytest.mark.parametrize("kinds", [1, 2])
def test_layers_that_are_held_one_by_one_compute_what_a_stack_does(kinds, monkeypatch):
    stack, x, batch = example(kinds)
    monkeypatch.setattr(layers_stack, "LARGE", 100)  # bytes: norms and biases stay stacked
    as_loop = arrange(stack, remat="saved", unroll=1)
    assert eqx.tree_equal(by_layer(as_loop, list), as_loop)
    unrolled = arrange(stack, remat="saved", unroll=5)
    trained, frozen = eqx.partition(unrolled, lambda one: eqx.is_array(one) and one.ndim == 2)
    held = by_layer(frozen, list)
    wide = [one for one in jax.tree.leaves(stack) if one.ndim > 2]
    assert len(jax.tree.leaves(held)) == sum(map(len, wide)) > len(jax.tree.leaves(frozen))

    @eqx.filter_jit
    def gradient(trained, frozen):
        def total(trained):
            return jnp.sum(jnp.sin(eqx.combine(trained, frozen)(x, Packed(batch))[0]))

        return eqx.filter_value_and_grad(total)(trained)

    found, expected = gradient(trained, held), gradient(trained, frozen)
    assert eqx.tree_equal(found, expected)


def test_rows_that_a_gpu_copies_one_by_one_are_the_same_gradient(monkeypatch):
    rows = jax.random.normal(jax.random.key(0), (3, 4, 5))
    d = jax.random.normal(jax.random.key(1), rows.shape)

    def stacked_gradient():
        back = jax.vjp(lambda x: jnp.stack(layers_stack._rows(x)), rows)[1]
        return jax.jit(back)(d)[0]

    with jax.set_mesh(mesh.build(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])):
        plain = stacked_gradient()
        monkeypatch.setattr(layers_stack, "on_one_gpu", lambda: True)
        monkeypatch.setattr(layers_stack, "LARGE", 1)
        # Written where nothing was, so that nothing must be left of that.
        copied = stacked_gradient()
    assert (plain == d).all() and (copied == d).all()


class SeveralStreams(Streams):
    """Streams that say that they are several, though one runs."""

    @property
    def are_several(self) -> bool:
        return True


def test_no_gradient_of_frozen_weights_is_computed_where_layers_take_turns(monkeypatch):
    stack, x, batch = example(2)
    stack = dataclasses.replace(stack, streams=SeveralStreams())
    weights, static = eqx.partition(stack, eqx.is_array)
    trained = jax.tree.map(lambda x: x.ndim < 3, weights)  # norms and biases, not matrices
    own, frozen = eqx.partition(weights, trained)

    def flops() -> float:
        def total(own):
            return jnp.sum(eqx.combine(own, frozen, static)(x, Packed(batch))[0])

        analysis = jax.jit(jax.grad(total)).lower(own).compile().cost_analysis()
        return analysis["flops"] if analysis else 0.0

    in_turn = flops()
    monkeypatch.setattr("windlass.layers.stack._in_turn", lambda x, weights: (x, weights))
    assert 0 < in_turn <= 1.01 * flops()


@pytest.mark.parametrize(
    ("kinds", "remat", "takes_turns"), [(2, "full", True), (2, "saved", False), (1, "full", False)]
)
def test_layers_of_a_round_that_are_computed_again_take_turns(kinds, remat, takes_turns):
    stack, x, batch = example(kinds)
    weights, static = eqx.partition(arrange(stack, remat=remat, unroll=1), eqx.is_array)

    def total(weights):
        return jnp.sum(eqx.combine(weights, static)(x, Packed(batch))[0])

    # Behind which the gradients of a layer are complete before the layer below is computed again.
    program = str(jax.make_jaxpr(jax.grad(total))(weights))
    assert ("optimization_barrier" in program) == takes_turns


@pytest.mark.parametrize("unroll", [1, 5])
def test_layers_of_two_kinds_each_keep_what_they_asked_to_keep(unroll):
    stack, x, batch = example(2)
    batch = {name: column[:1] for name, column in batch.items()}
    stack, x = arrange(stack, remat="saved", unroll=unroll), x[:1]

    @eqx.filter_jit
    def both(stack):
        cache, found = KVCache.empty(1, 8), []
        for here in (slice(0, 5), slice(5, 6), slice(6, 8)):
            context = DecodeContext(
                {name: column[:, here] for name, column in batch.items()}, cache
            )
            y, layers, _ = stack(x[:, here], context, cache.layers)
            cache = context.finish(layers)
            found.append(y)
        return jnp.concatenate(found, axis=1), stack(x, Packed(batch))[0]

    in_pieces, whole = both(stack)
    assert jnp.allclose(in_pieces, whole, atol=1e-5)
