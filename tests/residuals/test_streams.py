"""Streams of a residual: plain at first, kept between blocks, apart from adapters and families."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from windlass import adapters, models
from windlass.adapters.lora import Adapter
from windlass.errors import UserError
from windlass.hub.names import placed, to_tensors
from windlass.layers.context import Packed
from windlass.layers.kv_cache import KVCache
from windlass.layers.names import named
from windlass.layers.residual import ONE_STREAM, Connection
from windlass.layers.stack import Stack, arrange
from windlass.residuals import Architecture
from windlass.run import RESIDUALS

MHC, HC, Lite = (RESIDUALS.load(kind) for kind in ("mhc", "hc", "mhc_lite"))
Plain = RESIDUALS.load("plain")
KINDS = [pytest.param(HC, id="hc")] + [
    pytest.param(kind, id=name, marks=pytest.mark.long)
    for name, kind in (("mhc", partial(MHC, iterations=5)), ("mhc_lite", Lite))
]
BATCH, TABLE = tiny.rows(96), models.names(tiny.config("qwen3"))


def made(family: str, residual):
    return Architecture(tiny.config(family), residual).init(jax.random.key(0))


def refuses(family: str) -> bool:
    """Absence of a residual connection in a family, which must then refuse another one."""
    is_one = lambda node: isinstance(node, Connection)  # noqa: E731
    if any(map(is_one, jax.tree.leaves(tiny.abstract(tiny.config(family)), is_leaf=is_one))):
        return False
    with pytest.raises(UserError, match="no residual connection that it could replace"):
        made(family, HC())
    return True


def loss_program(model) -> str:
    weights, static = eqx.partition(model, eqx.is_array)
    gradient = jax.value_and_grad(lambda w: tiny.loss(eqx.combine(w, static), BATCH))
    return str(jax.make_jaxpr(gradient)(weights))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(MHC, id="mhc"),
        pytest.param(HC, id="hc", marks=pytest.mark.long),
        pytest.param(Lite, id="mhc_lite", marks=pytest.mark.long),
    ],
)
def test_one_stream_is_the_plain_residual_to_the_bit(unlike, kind):
    if refuses(unlike):
        return
    plain, one = made(unlike, Plain()), made(unlike, kind(streams=1))
    assert tiny.apart(jax.tree.leaves(one), jax.tree.leaves(plain)) == 0
    assert loss_program(one) == loss_program(plain)
    built = tiny.config(unlike).init(jax.random.key(0))
    assert eqx.tree_equal(plain, built)  # and plain is what the family builds
    assert plain.blocks.streams is ONE_STREAM


@pytest.mark.parametrize("kind", KINDS)
def test_four_streams_begin_as_a_plain_residual_in_every_family(unlike, kind):
    begins_as_plain(unlike, kind())


@pytest.mark.long
@pytest.mark.parametrize("decoder", ["qwen3", "llama", "gemma"])
def test_four_streams_of_mhc_begin_as_a_plain_residual(decoder):
    begins_as_plain(decoder, MHC())


def begins_as_plain(family: str, residual) -> None:
    if refuses(family):
        return
    config = tiny.config(family)
    plain = config.init(jax.random.key(0))
    wide = residual.connect(plain, config.sizes, key=jax.random.key(1))
    found, expected = (eqx.filter_jit(lambda m: m(BATCH)[0])(model) for model in (wide, plain))
    np.testing.assert_allclose(found, expected, atol=1e-5)


STREAMS = MHC(iterations=5)


def trained(seed: int = 3):
    """A model whose streams are no longer alike, as after some steps."""
    rng = np.random.default_rng(seed)

    def moved(x):
        return x + 0.3 * rng.normal(size=x.shape).astype(x.dtype) if eqx.is_array(x) else x

    return jax.tree.map(moved, made("qwen3", STREAMS))


def by_hand(model, batch, *, joined: bool):
    """The streams through the layers one by one; `joined` makes them one after each block."""
    streams = STREAMS
    x = streams.widen(model.embedding(batch["tokens"]))
    for layer in range(3):
        block = jax.tree.map(lambda w, i=layer: w[i], model.blocks.kinds[0])
        x = block(x, Packed(batch))
        x = streams.widen(streams.narrow(x)) if joined else x
    return model.norm(streams.narrow(x))


@pytest.mark.long
def test_streams_persist_between_blocks():
    model = trained()
    found = eqx.filter_jit(lambda m: m(BATCH)[0])(model)
    assert tiny.apart(found, by_hand(model, BATCH, joined=False)) < 1e-4
    assert tiny.apart(found, by_hand(model, BATCH, joined=True)) > 1e-2


@pytest.mark.long
def test_gradients_reach_the_weights_of_every_connection_and_layer():
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: tiny.loss(m, BATCH)))(trained())
    block = gradient.blocks.kinds[0]
    for connection in (block.attention_residual, block.mlp_residual):
        for name, of_layers in named(eqx.filter(connection, eqx.is_array)):
            assert np.abs(np.asarray(of_layers)).reshape(3, -1).max(axis=1).min() > 0, name


def test_a_branch_of_each_layer_has_weights_of_its_own_that_know_their_layer():
    block = made("gemma", MHC()).blocks.kinds  # of two kinds in turn
    assert [np.asarray(kind.mlp_residual.pre).argmax(-1).tolist() for kind in block] == [
        [0, 2],
        [1, 3],
    ]
    names = [name for name, _ in named(eqx.filter(made("gru", HC()), eqx.is_array))]
    assert "blocks.recurrence_residual.res" in names


@pytest.mark.long
def test_how_layers_are_run_changes_nothing_and_each_reports_its_gain():
    model = trained()

    def both(model):
        (loss, aux), gradient = eqx.filter_value_and_grad(
            lambda m: (tiny.loss(m, BATCH), m(BATCH)[1]), has_aux=True
        )(model)
        return loss, aux, jax.tree.leaves(gradient)

    found = [
        eqx.filter_jit(both)(arrange(model, remat=remat, unroll=unroll))
        for remat, unroll in (("saved", 1), ("full", 3))
    ]
    assert tiny.apart(*found) < 1e-5
    names = {f"residual_{metric}" for metric in ("row_error", "column_error", "entropy")}
    each = {f"{name}_{layer}" for name in names for layer in range(3)}
    assert found[0][1].keys() == names | each | {"residual_gain_forward", "residual_gain_backward"}


@pytest.mark.long
def test_generation_carries_the_streams_too():
    model, row = trained(), {name: x[:1] for name, x in BATCH.items()}

    @eqx.filter_jit
    def both(model):
        cache, found = KVCache.empty(1, 12), []
        for here in (slice(0, 7), slice(7, 8), slice(8, 12)):
            hidden, _, cache = model({name: x[:, here] for name, x in row.items()}, cache)
            found.append(hidden)
        return jnp.concatenate(found, axis=1), model(row)[0]

    assert tiny.apart(*both(model)) < 1e-5


def test_an_adapter_of_all_linear_maps_leaves_those_of_a_residual_alone():
    def adapted(*targets: str):
        adapter, base = Adapter(rank=2, targets=targets), made("qwen3", HC())
        return adapter.adapt(base, names=TABLE, key=jax.random.key(1))

    for target in ("*", "all-linear"):
        model = eqx.filter_eval_shape(lambda target=target: adapted(target))
        own = {name for name, is_own in named(adapters.own(model)) if is_own}
        assert own and not any("_residual" in name for name in own)
    with pytest.raises(UserError, match=r"targets: blocks.mlp_residual.\* matches no linear map"):
        adapted("blocks.mlp_residual.*")


def test_a_checkpoint_of_one_stream_fills_all_but_the_residual_and_one_of_ours_that_too():
    theirs, ours = made("qwen3", Plain()), trained()
    shapes = eqx.filter_eval_shape(lambda: ours)
    taken = placed(shapes, TABLE, to_tensors(theirs, TABLE), "elsewhere")
    paths = {array for array, _ in named(eqx.filter(ours, eqx.is_array))}
    assert not any("_residual" in path for path in taken)
    assert len(taken) == len(jax.tree.leaves(eqx.filter(theirs, eqx.is_array))) < len(paths)

    tensors = to_tensors(ours, TABLE)
    assert "blocks.0.mlp_residual.res" in tensors
    again = placed(shapes, TABLE, tensors, "here")
    assert tiny.apart(list(again.values()), jax.tree.leaves(eqx.filter(ours, eqx.is_array))) == 0
    del tensors["blocks.1.mlp_residual.res"]
    with pytest.raises(UserError) as refused:
        placed(shapes, TABLE, tensors, "the weights here")
    missing = "blocks.1.mlp_residual.res  is missing"
    assert str(refused.value) == f"1 problem in the weights here:\n  {missing}"


def test_a_model_without_a_residual_connection_is_refused():
    stack = Stack((tiny.model("gru").norm,), 1)
    with pytest.raises(UserError) as refused:
        MHC().connect(stack, {}, key=jax.random.key(0))
    assert str(refused.value) == (
        "residual.kind is mhc; the blocks of this model have no residual connection that it "
        "could replace: residual=plain leaves them as they are"
    )


def test_metrics_are_means_over_tokens_and_padding_is_none():
    model, document = made("qwen3", HC()), tiny.documents(96, [9])
    padded, bare = (eqx.filter_jit(model)(tiny.packed([document], length))[1] for length in (12, 8))
    assert {"residual_gain_forward", "residual_entropy", "residual_row_error_0"} <= bare.keys()
    assert tiny.apart(padded, bare) < 1e-6
    branches = 2 * tiny.config("qwen3").layers
    assert float(bare["residual_entropy"][1]) == 8 * branches
