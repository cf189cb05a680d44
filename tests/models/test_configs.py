"""What the families refuse."""

import dataclasses

import pytest

from tests import tiny
from windlass.config import read, tree
from windlass.errors import UserError


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_heads_that_cannot_be_are_refused_by_key(name):
    config = tiny.config(name)
    with pytest.raises(UserError) as error:
        read(type(config), tree(config) | {"kv_heads": 3})
    assert str(error.value) == (
        "1 problem in the recipe:\n  kv_heads  is 3; it must divide heads (4)"
    )
    with pytest.raises(UserError) as error:
        read(type(config), tree(config) | {"head_dim": 7})
    assert str(error.value) == (
        "1 problem in the recipe:\n  head_dim  is 7; rotary positions need an even one"
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_no_number_that_identifies_a_model_has_a_default(name):
    fields = dataclasses.fields(tiny.config(name))
    without = {field.name for field in fields if field.default is dataclasses.MISSING}
    assert without == {
        *("vocab", "embed", "mlp", "layers", "heads", "kv_heads", "head_dim", "theta")
    }
