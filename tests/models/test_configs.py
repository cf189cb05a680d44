"""What the families refuse."""

import dataclasses

import pytest

from tests import tiny
from tests.models.reference import FAMILIES
from windlass.config import read, tree
from windlass.errors import UserError


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("kv_heads", 3, "is 3; it must divide heads (4)"),
        ("kv_heads", 0, "is 0; it must be 1 or more"),
        ("layers", -2, "is -2; it must be 1 or more"),
        ("head_dim", 7, "is 7; rotary positions need an even one"),
        ("head_dim", None, "is null; it must be a whole number"),
        ("theta", 1.0, "is 1.0; it must be above 1"),
        ("pairing", "halves", 'is "halves"; did you mean half?'),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_key(name, field, value, what):
    assert refusal(name, field, value) == f"1 problem in the recipe:\n  {field}  {what}"


@pytest.mark.parametrize(
    ("name", "field", "value", "what"),
    [
        ("mistral", "window", 0, "is 0; it must be 1 or more, a query's own position"),
        ("gemma", "window", 0, "is 0; it must be 1 or more, a query's own position"),
        ("gemma", "window", None, "is null; it must be a whole number"),
        ("gemma", "local_theta", 0.5, "is 0.5; it must be above 1"),
        ("gemma", "global_every", 0, "is 0; it must be 1 or more"),
        ("gemma", "query_width", 0, "is 0; it must be 1 or more"),
    ],
)
def test_a_window_or_a_pattern_that_cannot_be_is_refused_by_key(name, field, value, what):
    assert refusal(name, field, value) == f"1 problem in the recipe:\n  {field}  {what}"


def refusal(name: str, field: str, value) -> str:
    config = tiny.config(name)
    with pytest.raises(UserError) as error:
        read(type(config), tree(config) | {field: value})
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_number_that_identifies_a_model_has_a_default(name):
    fields = dataclasses.fields(tiny.config(name))
    without = {field.name for field in fields if field.default is dataclasses.MISSING}
    own = {"gemma": {"local_theta", "window"}}.get(name, set())
    assert without == own | {
        *("vocab", "embed", "mlp", "layers", "heads", "kv_heads", "head_dim", "theta")
    }
