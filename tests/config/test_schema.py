"""The JSON schema of a recipe, and what it takes from the source."""

from windlass.config import comments, json_schema


def test_a_field_is_explained_by_the_comment_beside_it_or_above_it(run):
    assert comments(run.__annotations__["optim"]) == {
        "learning_rate": "at its peak",
        "decay_fraction": "the last part of the run, down to zero",
        "clip_norm": "null: no clipping",
    }


def test_a_class_without_source_has_no_comments():
    space = {"__name__": "typed"}
    exec("from windlass.config import section\n@section\nclass A:\n    b: int  # c", space)
    assert comments(space["A"]) == {}


def test_a_section_keeps_its_meaning_types_and_defaults(run):
    optim = json_schema(run)["properties"]["optim"]
    assert optim["description"] == "A toy optimiser. (required)"
    assert optim["properties"]["learning_rate"] == {
        "type": "number",
        "description": "at its peak (required); elsewhere lr, max_lr, peak_lr",
    }
    assert optim["properties"]["clip_norm"] == {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "default": 1.0,
        "description": "null: no clipping; elsewhere max_grad_norm, grad_clip, "
        "gradient_clip_val, gradient_clipping, grad_clip_norm",
    }
    assert optim["additionalProperties"] is False


def test_an_open_set_offers_every_file_of_its_folder(run):
    model = json_schema(run)["properties"]["model"]
    *families, names = model["anyOf"]
    assert [family["properties"]["family"]["const"] for family in families] == ["llama", "qwen3"]
    described = families[0]["properties"]["layers"]["description"]
    assert described.startswith("how deep it is (required); elsewhere num_hidden_layers, ")
    assert names == {"enum": ["llama", "qwen3"]}


def test_a_section_with_a_shorthand_takes_the_bare_value_too(run):
    device = json_schema(run)["properties"]["device"]
    assert device["anyOf"][0] == {"enum": ["auto", "tpu", "gpu", "cpu"], "type": "string"}
    assert device["anyOf"][1]["properties"]["count"]["default"] is None
    assert device["default"] == {"kind": "auto", "count": None}


def test_lists_mappings_and_optional_sections_are_described(run):
    properties = json_schema(run)["properties"]
    assert properties["parts"]["items"]["properties"]["path"]["type"] == "string"
    assert properties["teacher"]["anyOf"][1] == {"type": "null"}
    assert properties["weights"]["anyOf"][0]["additionalProperties"] == {"type": "number"}


def test_every_kind_of_device_may_set_every_key_but_the_device(run):
    schema = json_schema(run)
    tpu = schema["properties"]["by_device"]["properties"]["tpu"]
    assert tpu["properties"]["train"] == {"$ref": "#/properties/train"}
    assert set(tpu["properties"]) == set(schema["properties"]) - {"by_device", "device"}
