"""Grids of GGUF as adapters: what is trained is what a file of llama.cpp's holds."""

import dataclasses
from typing import Any

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tiny
from tests.quantization.test_blocks import packed
from windlass import adapters
from windlass.adapters import BaseAdapter
from windlass.adapters.grid import Adapter
from windlass.adapters.lora import Adapter as Lora
from windlass.devices.axes import cast, matrices
from windlass.errors import UserError
from windlass.hub.names import to_tensors
from windlass.layers.linear import Linear
from windlass.models import names
from windlass.program.abstract import is_shape
from windlass.program.trainable import choose
from windlass.quantization.blocks import FORMATS

key = jax.random.key
SIZES = dict(embed=64, mlp=16)


def config(family: str):
    """The tiny config with sizes of which groups of 32 can be made."""
    return dataclasses.replace(tiny.config(family), mlp=64, head_dim=16)


def adapted(family: str, *chosen) -> Any:
    return tiny.adapted(tiny.made(config(family)), *chosen)


def abstract(family: str, adapter: Adapter) -> Any:
    """The tiny model as it is, abstract and adapted."""
    init = tiny.config(family).init
    return eqx.filter_eval_shape(lambda: adapter.adapt(init(key(0)), names={}, key=key(1)))


def matrix(made: Any) -> np.ndarray:
    return np.asarray(eqx.filter_jit(lambda made: made.merged().weight)(made))


def on_grid(tensor: np.ndarray, name: str) -> np.ndarray:
    """A matrix [outputs, inputs] as it comes back from a file."""
    kind = gguf.GGMLQuantizationType[FORMATS[name].gguf]
    return gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)


OTHERS = ("gemma", "mistral", "qwen2", "qwen3")
LONG = [pytest.param(name, marks=pytest.mark.long) for name in OTHERS]


@pytest.mark.parametrize("kind", ["llama", *LONG])
def test_every_map_in_the_layout_of_hugging_face_is_what_a_file_holds(kind):
    """Groups lie along the inputs of each row there: pairs of RoPE reorder rows, and no group."""
    model, table = tiny.made(config(kind)), names(config(kind))
    plain = to_tensors(model, table)
    rounded = eqx.filter_jit(adapters.merged)(adapted(kind, Adapter()))
    found = to_tensors(rounded, table)
    maps = [name for name in found if "proj" in name and name.endswith("weight")]
    assert found.keys() == plain.keys() and len(maps) == 7 * config(kind).layers
    for name in found:
        expected = on_grid(plain[name], "q4_0") if name in maps else plain[name]
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize(
    "adapter",
    [Adapter(format="mxfp4"), Adapter(scale="learned"), Adapter(format="tq2_0")],
    ids=["mxfp4", "q4_0 learned", "tq2_0 learned"],
)
def test_codes_and_scales_are_the_matrix_and_pack_into_a_file(adapter):
    linear = Linear("heads head_dim", "embed", dict(heads=16, head_dim=32, embed=8), key=key(0))
    made: Any = tiny.adapted(linear, adapter)
    codes, scales = (np.asarray(x) for x in eqx.filter_jit(made.coded)())
    size, merged = made.blocks.size, matrix(made)
    each = codes.reshape(-1, size, 8) * scales[:, None]
    assert (each.reshape(merged.shape) == merged).all() and codes.dtype == np.int8
    rows, scales = codes.reshape(-1, size, 8).transpose(2, 0, 1), scales.T[..., None]
    data = packed(rows, scales, adapter.format)
    kind = gguf.GGMLQuantizationType[adapter.gguf]
    assert (gguf.quants.dequantize(data, kind) == merged.reshape(-1, 8).T).all()
    assert data.nbytes * 8 / merged.size == made.bits_per_weight


def test_a_scale_fitted_to_the_least_error_beats_the_largest_weight():
    weight = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    linear = Linear.of(("embed",), ("mlp",), jnp.asarray(weight))

    def error(adapter: Adapter) -> float:
        made: Any = tiny.adapted(linear, adapter)
        return float(np.mean((matrix(made) - weight) ** 2))

    found = {
        (name, scale): error(Adapter(format=name, scale=scale))
        for name in ("q4_0", "tq2_0")
        for scale in ("max", "learned")
    }
    assert found["q4_0", "learned"] < 0.9 * found["q4_0", "max"]
    assert found["tq2_0", "learned"] < 0.4 * found["tq2_0", "max"]
    assert found["tq2_0", "learned"] == pytest.approx(0.19, rel=0.05)  # Lloyd-Max of three levels


def gradients(adapter: BaseAdapter, reads: str, writes: str, sizes: tuple[int, int, int]) -> Any:
    """The output of a map on a mesh, and the gradients of what it is made of."""
    of = dict(embed=64, heads=4, head_dim=16)
    linear = Linear(reads, writes, of, bias=True, key=key(0))
    made: Any = eqx.filter_jit(adapter.adapt)(linear, names={}, key=key(1))
    x = jax.random.normal(key(2), (4, 4, *(of[name] for name in reads.split())))

    @eqx.filter_jit
    def step(made, x):
        loss = lambda made: jnp.sum(jnp.sin(made(x)))  # noqa: E731
        return made(x), eqx.filter_grad(loss)(made)

    with tiny.on(sizes) as mesh:
        made, x = tiny.placed(made, x, mesh)
        if reads.startswith("heads"):
            x = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")))
        return jax.device_get(step(made, x))


@pytest.mark.parametrize(
    ("reads", "writes", "split", "scale"),
    [
        ("embed", "heads head_dim", (1, 2, 2), "learned"),  # 32 of 64 inputs on each of two devices
        ("embed", "heads head_dim", (1, 4, 2), "max"),  # 16 of them: half a group
        ("heads head_dim", "embed", (1, 2, 4), "learned"),  # one head of 16
    ],
)
def test_a_map_and_its_gradients_are_the_same_on_a_mesh_that_splits_its_inputs(
    reads, writes, split, scale
):
    adapter = Adapter(scale=scale)
    alone, apart = (gradients(adapter, reads, writes, sizes) for sizes in ((1, 1, 1), split))
    assert tiny.apart(apart, alone) < 1e-5


@pytest.mark.long
def test_loss_and_gradients_of_a_model_are_the_same_on_a_mesh_of_all_three_axes():
    some, others = ("*.query", "*.output"), ("*.key", "*.value", "*.mlp.*")
    model = adapted("llama", Adapter(scale="learned", targets=some), Adapter(targets=others))
    batch = tiny.rows(96)

    @eqx.filter_jit
    def step(model, batch):
        return eqx.filter_value_and_grad(tiny.loss)(model, batch)

    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        with tiny.on(sizes) as mesh:
            whole, rows = tiny.placed(model, batch, mesh)
            found.append(jax.device_get(step(whole, rows)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert tiny.apart(found[1][1], found[0][1]) < 1e-5


def test_weights_are_rounded_in_float32_and_cast_afterwards():
    made: Any = Adapter().adapt(Linear("embed", "mlp", SIZES, key=key(0)), names={}, key=key(1))
    low, x = cast(made, "bfloat16"), jax.random.normal(key(2), (2, 3, 64), jnp.bfloat16)
    assert low.latent.dtype == jnp.float32
    weight = low.merged().weight
    assert (weight == made.merged().weight).all()
    expected = jnp.tensordot(x, weight.astype(jnp.bfloat16), axes=1)
    assert low(x).dtype == jnp.bfloat16 and (low(x) == expected).all()


def test_latent_weights_are_trained_and_decayed_and_scales_only_trained():
    linear = Linear("embed", "mlp", SIZES, key=key(0))

    def trained(adapter: Adapter) -> set[str]:
        make = lambda: adapter.adapt(linear, names={}, key=key(1))  # noqa: E731
        arrays: Any = eqx.filter(eqx.filter_eval_shape(make), is_shape)
        assert [x for x in ("latent", "scale") if getattr(matrices(arrays), x)] == ["latent"]
        return {x for x in ("latent", "scale") if getattr(choose(arrays, None).mask, x)}

    assert trained(Adapter()) == {"latent"}
    assert trained(Adapter(scale="learned")) == {"latent", "scale"}
    assert trained(Adapter(scale="learned", trains="scales")) == {"scale"}


@pytest.mark.parametrize("dora", [False, True])
def test_lora_over_a_grid_starts_as_the_grid_and_is_turned_off_to_it(dora):
    linear = Linear("embed", "mlp", SIZES, key=key(0))
    grid: Any = Adapter(trains="none").adapt(linear, names={}, key=key(1))
    both: Any = Lora(rank=2, dora=dora).adapt(grid, names={}, key=key(2))
    x = jax.random.normal(key(3), (2, 3, 64))
    np.testing.assert_allclose(both(x), grid(x), atol=1e-6)
    assert eqx.tree_equal(adapters.plain(both), grid)
    mask = choose(eqx.filter(both, eqx.is_array), None).mask
    assert mask.down.weight and mask.up.weight and not mask.base.latent


def test_a_map_that_cannot_be_cut_into_groups_is_refused_with_those_that_can():
    with pytest.raises(UserError) as refusal:
        abstract("llama", Adapter(targets=("*.output", "*.mlp.*")))
    assert str(refusal.value) == (
        "q4_0 has groups of 32 inputs, into which these maps cannot be cut: "
        "blocks.attention.output reads 40, blocks.mlp.down reads 48; adapter.targets: "
        "[blocks.mlp.gate, blocks.mlp.up] leaves out those it cannot"
    )
    with pytest.raises(UserError) as refusal:
        abstract("gemma", Adapter(format="tq2_0"))
    assert str(refusal.value).endswith("blocks.mlp.down reads 48; no map here can")


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(ValueError) as refusal:
        Adapter(format="mxfp4", scale="learned", targets=())
    assert refusal.value.args == (
        "scale is learned; of mxfp4 it is a power of two: use max",
        "targets is empty; it must choose a linear map",
    )
    with pytest.raises(ValueError) as refusal:
        Adapter(trains="scales")
    assert refusal.value.args == (
        "trains is scales, which scale: max does not learn; use scale: learned",
    )
