"""Names of axes decide where arrays live, what is decayed and what is cast."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests import tiny
from windlass.devices.axes import annotate, cast, layout, matrices, placements, shard, undivided
from windlass.layers.head import Head
from windlass.layers.linear import Linear
from windlass.models.qwen3 import Config


def specs(tree, mesh) -> dict[str, P]:
    placed = jax.tree_util.tree_leaves_with_path(placements(tree, mesh))
    return {jax.tree_util.keystr(path, simple=True, separator="."): at.spec for path, at in placed}


def test_every_array_is_placed_by_the_names_of_its_own_axes_stacked_or_not():
    with tiny.on((2, 2, 2)) as mesh:
        found = specs(tiny.abstract(Config.tiny()), mesh)
    assert found == {
        "embedding.weight": P("tensor", "fsdp"),
        "blocks.kinds.0.attention_norm.scale": P(None, "fsdp"),
        "blocks.kinds.0.attention.query.weight": P(None, "fsdp", "tensor", None),
        "blocks.kinds.0.attention.query.bias": P(None, "tensor", None),
        "blocks.kinds.0.attention.key.weight": P(None, "fsdp", "tensor", None),
        "blocks.kinds.0.attention.key.bias": P(None, "tensor", None),
        "blocks.kinds.0.attention.value.weight": P(None, "fsdp", "tensor", None),
        "blocks.kinds.0.attention.value.bias": P(None, "tensor", None),
        "blocks.kinds.0.attention.output.weight": P(None, "tensor", None, "fsdp"),
        "blocks.kinds.0.attention.output.bias": P(None, "fsdp"),
        "blocks.kinds.0.attention.query_norm.scale": P(None, None),
        "blocks.kinds.0.attention.key_norm.scale": P(None, None),
        "blocks.kinds.0.mlp_norm.scale": P(None, "fsdp"),
        "blocks.kinds.0.mlp.gate.weight": P(None, "fsdp", "tensor"),
        "blocks.kinds.0.mlp.up.weight": P(None, "fsdp", "tensor"),
        "blocks.kinds.0.mlp.down.weight": P(None, "tensor", "fsdp"),
        "norm.scale": P("fsdp"),
        "output.weight": P("tensor", "fsdp"),
    }


def test_moments_are_placed_as_their_weights_and_counters_are_whole():
    weights = tiny.abstract(Config.tiny())
    with tiny.on((2, 2, 2)) as mesh:
        moments = specs(eqx.filter_eval_shape(optax.adam(1.0).init, weights), mesh)
        expected = specs(weights, mesh)
    assert moments.pop("0.count") == P()
    assert moments == {
        f"0.{moment}.{path}": spec for moment in ("mu", "nu") for path, spec in expected.items()
    }


def test_what_does_not_divide_is_whole_and_is_said():
    config = Config(
        vocab=97, embed=30, mlp=64, layers=2, heads=8, kv_heads=2, head_dim=4, theta=1e4
    )
    model = tiny.abstract(config)
    with tiny.on((1, 2, 4)) as mesh:
        found = specs(model, mesh)
        assert found["embedding.weight"] == P(None, "fsdp")
        assert found["blocks.kinds.0.attention.key.weight"] == P(None, "fsdp", None, None)
        assert undivided(model, mesh) == [
            "vocab (97) is not split 4 ways over tensor",
            "2 kv heads on tensor 4: keys and values are held 2 times",
        ]
    with tiny.on((1, 8, 1)) as mesh:
        assert undivided(model, mesh) == ["embed (30) is not split 8 ways over fsdp"]
    with tiny.on((8, 1, 1)) as mesh:
        assert undivided(model, mesh) == []


def test_only_matrices_are_cast_and_only_those_of_fractions():
    linear = Linear("embed", "mlp", dict(embed=4, mlp=6), bias=True, key=jax.random.key(0))
    tree = {"linear": linear, "head": Head(jnp.ones((3, 4), jnp.float16)), "count": jnp.int32(1)}
    for dtype in ("bfloat16", "float32"):
        found = jax.tree.map(lambda x: str(x.dtype), cast(tree, dtype))
        assert found["linear"].weight == found["head"].weight == dtype
        assert found["linear"].bias == "float32"
        assert found["count"] == "int32"
    assert jax.tree.leaves(matrices(tree)) == [False, True, True, False]


def test_a_part_of_a_model_is_walked_like_the_whole():
    linear = Linear("embed", "mlp", dict(embed=4, mlp=6), bias=True, key=jax.random.key(0))
    biasless = Linear("embed", "mlp", dict(embed=4, mlp=6), key=jax.random.key(0))
    names = annotate([linear, biasless, None], lambda x, about: " ".join(about.axes))
    assert (names[0].weight, names[0].bias) == ("embed mlp", "mlp")
    assert (names[1].weight, names[1].bias, names[2]) == ("embed mlp", None, None)


def test_an_activation_has_as_many_names_as_axes():
    with pytest.raises(ValueError) as error:
        layout("batch seq", (2, 3, 4))
    assert str(error.value) == "'batch seq' names 2 axes; the array has shape (2, 3, 4)"


def test_rows_are_split_over_data_and_fsdp_and_without_a_mesh_nothing_is():
    x = jnp.zeros((8, 3, 4))
    assert layout("batch seq heads", x.shape) is None
    assert shard(x, "batch seq heads") is x
    with tiny.on((2, 2, 2)):
        assert layout("batch seq heads", x.shape) == P(("data", "fsdp"), None, "tensor")
        assert layout("batch seq heads", (6, 3, 5)) == P(None, None, None)
        assert jax.typeof(shard(x, "batch seq heads")).sharding.spec == P(
            ("data", "fsdp"), None, "tensor"
        )
