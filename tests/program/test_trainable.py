"""Which weights are trained."""

import equinox as eqx
import jax
import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.program.trainable import choose


def arrays():
    return eqx.filter(tiny.model("llama"), eqx.is_array)


def test_patterns_choose_arrays_by_name_and_count_them():
    everything, some = choose(arrays(), ("*",)), choose(arrays(), ("blocks.mlp.*", "norm.scale"))
    assert everything.trained == everything.total == sum(x.size for x in jax.tree.leaves(arrays()))
    chosen = eqx.filter(arrays(), some.mask)
    mlp = eqx.filter(tiny.model("llama").blocks.kinds[0].mlp, eqx.is_array)
    expected = sum(x.size for x in jax.tree.leaves(mlp)) + tiny.config("llama").embed
    assert some.trained == expected == sum(x.size for x in jax.tree.leaves(chosen))
    assert some.total == everything.total


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(UserError) as refusal:
        choose(arrays(), ("blocks.attention.*", "head.*", "lora"))
    assert str(refusal.value) == (
        "train.trainable: head.*, lora matches no weight; there are\n"
        "  embedding.weight\n"
        "  blocks.attention_norm.scale\n"
        "  blocks.attention.query.weight\n"
        "  blocks.attention.query.bias\n"
        "  blocks.attention.key.weight\n"
        "  blocks.attention.key.bias\n"
        "  blocks.attention.value.weight\n"
        "  blocks.attention.value.bias\n"
        "  blocks.attention.output.weight\n"
        "  blocks.attention.output.bias\n"
        "  blocks.mlp_norm.scale\n"
        "  blocks.mlp.gate.weight\n"
        "  blocks.mlp.gate.bias\n"
        "  blocks.mlp.up.weight\n"
        "  blocks.mlp.up.bias\n"
        "  blocks.mlp.down.weight\n"
        "  blocks.mlp.down.bias\n"
        "  norm.scale"
    )
