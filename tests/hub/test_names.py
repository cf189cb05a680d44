"""Names and layout of a checkpoint's tensors, and what is said when they do not fit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import tiny
from windlass.devices.axes import placements
from windlass.errors import UserError
from windlass.hub.names import to_tensors
from windlass.layers.linear import Linear
from windlass.layers.norm import RMSNorm
from windlass.layers.stack import Stack, stacked
from windlass.models import phi3
from windlass.models.llama import NAMES


class Two(eqx.Module):
    blocks: Stack
    norm: RMSNorm


@pytest.fixture
def two() -> Two:
    """Three layers of two kinds in turn."""
    sizes = dict(embed=2, heads=2, head_dim=3)

    def into(key, layer):
        return {"map": Linear("embed", "heads head_dim", sizes, bias=True, key=key)}

    def back(key, layer):
        return {"map": Linear("heads head_dim", "embed", sizes, key=key)}

    stack = stacked([into, back], 3, key=jax.random.key(0))
    return Two(stack, RMSNorm("embed", sizes, eps=1e-6))


def test_a_layer_has_its_number_in_the_whole_stack_and_a_matrix_lies_as_in_torch(two):
    names = {"blocks.map": "layer.{layer}.map", "norm.scale": "last.weight"}
    tensors = to_tensors(two, names)
    assert {name: x.shape for name, x in tensors.items()} == {
        "layer.0.map.weight": (6, 2),
        "layer.0.map.bias": (6,),
        "layer.1.map.weight": (2, 6),
        "layer.2.map.weight": (6, 2),
        "layer.2.map.bias": (6,),
        "last.weight": (2,),
    }
    into, back = (kind["map"].weight for kind in two.blocks.kinds)
    assert np.array_equal(tensors["layer.2.map.weight"][4], into[1, :, 1, 1])
    assert np.array_equal(tensors["layer.1.map.weight"][:, 5], back[0, 1, 2])
    assert all(x.flags.c_contiguous for x in tensors.values())
    assert eqx.tree_equal(tiny.filled(two, names, tensors), two)


def test_without_a_table_every_array_has_its_own_path(two):
    tensors = to_tensors(two, {})
    assert list(tensors) == [
        "blocks.0.map.weight",
        "blocks.2.map.weight",
        "blocks.0.map.bias",
        "blocks.2.map.bias",
        "blocks.1.map.weight",
        "norm.scale",
    ]
    assert eqx.tree_equal(tiny.filled(two, {}, tensors), two)


def test_an_array_is_filled_where_it_lives_and_in_the_type_it_has():
    tensors = {name: x.astype(np.float16) for name, x in to_tensors(model(), NAMES).items()}
    with tiny.on((2, 2, 2)) as mesh:
        arrays, static = eqx.partition(model(), eqx.is_array)
        shapes = jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            arrays,
            placements(arrays, mesh),
        )
        filled = tiny.filled(eqx.combine(shapes, static), NAMES, tensors)
        at = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    assert filled.embedding.weight.sharding == at
    assert filled.embedding.weight.dtype == jnp.float32
    assert tiny.apart(filled, model()) < 1e-3


def model():
    return tiny.model("llama")


def test_tensors_that_do_not_fit_are_refused_all_at_once():
    tensors = to_tensors(model(), NAMES)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.bias"]
    tensors["lm_head.weight"] = np.zeros((96, 32), np.float32)
    query = "model.layers.2.self_attn.q_proj.weight"
    tensors[query] = tensors[query].T
    with pytest.raises(UserError) as error:
        tiny.filled(model(), NAMES, tensors)
    assert str(error.value) == (
        "4 problems in the tensors:\n"
        "  model.layers.2.self_attn.q_proj.weight  is [32, 40]; this model's is [40, 32]\n"
        "  model.layers.1.mlp.up_proj.bias         is missing\n"
        "  model.norm.weight                       is missing\n"
        "  lm_head.weight                          is nothing of this model's"
    )


def test_a_tensor_of_several_maps_is_split_and_joined_and_refused_by_its_own_name():
    model, names = tiny.model("phi3"), phi3.NAMES
    tensors = to_tensors(model, names)
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    assert tensors[fused].shape == (80, 32)
    value = np.asarray(model.blocks.kinds[0].attention.value.weight)[1]
    assert np.array_equal(tensors[fused][60:], value.reshape(32, 20).T)
    tensors[fused] = tensors[fused][:70]
    del tensors["model.layers.2.mlp.gate_up_proj.weight"]
    with pytest.raises(UserError) as error:
        tiny.filled(model, names, tensors)
    assert str(error.value) == (
        "2 problems in the tensors:\n"
        "  model.layers.1.self_attn.qkv_proj.weight  is [70, 32]; this model's is [80, 32]\n"
        "  model.layers.2.mlp.gate_up_proj.weight    is missing"
    )


def test_an_array_that_the_table_does_not_name_is_a_mistake_of_the_family(two):
    with pytest.raises(ValueError) as error:
        to_tensors(two, {"blocks.map": "layer.{layer}.map"})
    assert str(error.value) == "the family's table has no name for norm.scale"
