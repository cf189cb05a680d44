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
    if not hasattr(tiny.config(name), field):
        return
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
        ("gemma4", "window", 0, "is 0; it must be 1 or more, a query's own position"),
        ("gemma4", "local_theta", 0.5, "is 0.5; it must be above 1"),
        ("gemma4", "global_every", 0, "is 0; it must be 1 or more"),
        ("gemma4", "global_head_dim", 7, "is 7; rotary positions need an even one"),
        ("gemma4", "global_kv_heads", 3, "is 3; it must divide heads (4)"),
        ("gemma4", "per_layer", 0, "is 0; it must be 1 or more"),
        ("gemma4", "logit_cap", 0.0, "is 0.0; it must be above 0"),
        ("gemma4", "rotary_share", 1.5, "is 1.5; it must be a share, above 0 and up to 1"),
        (
            *("gemma4", "layers", 9),
            "is 9; it must be a multiple of global_every (2): the last layer has global attention",
        ),
        (
            *("gemma4", "kv_shared_layers", 7),
            "is 7; it must be 0 to 2: the first 2 layers have the keys and values that others "
            "share",
        ),
        ("mixtral", "experts_per_token", 9, "is 9; it must be 1 to experts (8)"),
        ("mixtral", "balance", -0.1, "is -0.1; it must be 0 or more"),
        ("qwen3_5", "attention_every", 0, "is 0; it must be 1 or more"),
        ("qwen3_5", "taps", 0, "is 0; it must be 1 or more"),
        ("qwen3_5", "value_dim", -1, "is -1; it must be 1 or more"),
        ("qwen3_5", "key_heads", 3, "is 3; it must divide value_heads (4)"),
        (
            *("qwen3_5", "rotary_share", 0.3),
            "is 0.3; it must be a share, above 0 and up to 1, that makes an even number of the 10 "
            "entries of a head",
        ),
        ("qwen3_5_moe", "experts_per_token", 0, "is 0; it must be 1 to experts (8)"),
        ("qwen3_5_moe", "shared_mlp", 0, "is 0; it must be 1 or more"),
        ("olmo3", "window", 0, "is 0; it must be 1 or more, a query's own position"),
        ("olmo3", "global_every", 0, "is 0; it must be 1 or more"),
        (
            *("phi3", "rotary_share", 0.5),
            "is 0.5; it must be above 0 and at most 1, with an even number of the 10 entries of a "
            "head",
        ),
        ("phi3", "window", 0, "is 0; it must be 1 or more, a query's own position"),
        ("smollm3", "no_rope_every", 0, "is 0; it must be 1 or more"),
        ("granite", "attention_multiplier", 0.0, "is 0.0; it must be above 0"),
        ("granite", "embedding_multiplier", 0.0, "is 0.0; it must be above 0"),
        ("granite", "residual_multiplier", -1.0, "is -1.0; it must be above 0"),
        ("granite", "logits_scaling", 0.0, "is 0.0; it must be above 0"),
    ],
)
def test_what_a_family_adds_and_cannot_be_is_refused_by_key(name, field, value, what):
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
    sparse = {"experts", "experts_per_token"}
    delta = {"key_heads", "value_heads", "key_dim", "value_dim"}
    own = {
        "gemma": {"local_theta", "window"},
        "gemma4": {"global_head_dim", "local_theta", "window"},
        "gpt_oss": sparse | {"window"},
        "granite": {"attention_multiplier"},
        "mixtral": sparse,
        "olmo3": {"window"},
        "qwen3_moe": sparse,
        "qwen3_5": delta,
        "qwen3_5_moe": sparse | delta | {"shared_mlp"},
    }
    assert without == own.get(name, set()) | {
        *("vocab", "embed", "mlp", "layers", "heads", "kv_heads", "head_dim", "theta")
    }
