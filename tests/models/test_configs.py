"""What the families refuse."""

import dataclasses

import pytest

from tests import tiny
from windlass.config import read, tree
from windlass.errors import UserError


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("kv_heads", 3, "is 3; it must divide heads (4)"),
        ("kv_heads", 0, "is 0; it must be 1 or more"),
        ("layers", -2, "is -2; it must be 1 or more"),
        ("head_dim", 7, "is 7; rotary positions need an even one"),
        ("theta", 0.0, "is 0.0; it must be above 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_key(name, field, value, what):
    config = tiny.config(name)
    with pytest.raises(UserError) as error:
        read(type(config), tree(config) | {field: value})
    assert str(error.value) == f"1 problem in the recipe:\n  {field}  {what}"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_no_number_that_identifies_a_model_has_a_default(name):
    fields = dataclasses.fields(tiny.config(name))
    without = {field.name for field in fields if field.default is dataclasses.MISSING}
    assert without == {
        *("vocab", "embed", "mlp", "layers", "heads", "kv_heads", "head_dim", "theta")
    }
