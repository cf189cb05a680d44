"""config.json is read as transformers reads it, in both spellings, and written for both."""

import dataclasses
import importlib
import json
import math
from typing import Any

import equinox as eqx
import jax
import pytest

from tests import tiny
from tests.hub import folders
from tests.hub.published import ALL, GEMMA_3_1B_IT, LLAMA_3_2_1B, MISTRAL_7B_V0_1, QWEN2_5_0_5B
from tests.models import reference
from windlass.config import read as read_section
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.hub import rope

published = pytest.mark.parametrize("name", ALL)
# What only one of the two spellings has.
CURRENT = ("rope_parameters", "dtype", "layer_types")
FORMER = ("rope_theta", "rope_local_base_freq", "rope_scaling", "torch_dtype")


def section(config: dict[str, Any]):
    """What a config.json stands for, read as a recipe's section is."""
    found = configs.read(config, "config.json")
    family = importlib.import_module(f"windlass.models.{found.pop('family')}")
    return read_section(family.Config, found)


def text(name: str) -> dict[str, Any]:
    return json.loads(ALL[name][0])


def theirs(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers understands of a config.json, in our words."""
    from transformers import CONFIG_MAPPING

    one = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    far, near = one.rope_parameters, None
    if "full_attention" in far:
        far, near = far["full_attention"], far["sliding_attention"]
    if near and config["model_type"] == "olmo3":
        # Of the older spelling it reads one base, and would give the other layers its own default.
        assert near.pop("rope_theta") in (far["rope_theta"], 500000.0)
        near = {"rope_theta": None}
    near_layer, far_layer = one, None
    if config["model_type"] == "gemma4_text":
        near_layer, far_layer = (one.per_layer_config[number] for number in (0, -1))
    kinds = getattr(one, "layer_types", None) or []
    window = getattr(one, "sliding_window", None)
    found = {
        "vocab": one.vocab_size,
        "embed": one.hidden_size,
        "mlp": getattr(one, "moe_intermediate_size", None) or one.intermediate_size,
        "layers": one.num_hidden_layers,
        "heads": one.num_attention_heads,
        "kv_heads": near_layer.num_key_value_heads,
        "head_dim": getattr(near_layer, "head_dim", one.hidden_size // one.num_attention_heads),
        "global": far_layer and (far_layer.num_key_value_heads, far_layer.head_dim),
        "eps": one.rms_norm_eps,
        "tied": one.tie_word_embeddings,
        "theta": far["rope_theta"],
        "local_theta": near and near["rope_theta"],
        "windows": [
            window if kind == "sliding_attention" or not kinds else None
            for kind in kinds or [None] * one.num_hidden_layers
        ],
        "scale": getattr(one, "query_pre_attn_scalar", None),
        "share": far.get("partial_rotary_factor", 1.0),
        "without_rope": [not turned for turned in getattr(one, "no_rope_layers", None) or []],
    }
    kind = far["rope_type"]
    if kind not in ("default", "proportional"):  # the share says all of the second
        found["scaling"] = {"kind": kind} | {
            field: far[word] for field, word in rope.WORDS[kind].items() if word in far
        }
    return found


def ours(config) -> dict[str, Any]:
    every = getattr(config, "global_every", None)
    window = getattr(config, "window", None)
    found = {
        name: getattr(config, name)
        for name in "vocab embed mlp layers heads kv_heads head_dim eps theta".split()
    } | {
        "tied": getattr(config, "tied", True),
        "global": hasattr(config, "global_head_dim")
        and (config.global_kv_heads or config.kv_heads, config.global_head_dim)
        or None,
        "local_theta": getattr(config, "local_theta", None),
        "windows": [
            None if every and (layer + 1) % every == 0 else window for layer in range(config.layers)
        ],
        "scale": getattr(config, "query_width", None),
        "share": getattr(config, "rotary_share", 1.0),
        "without_rope": [
            (layer + 1) % config.no_rope_every == 0
            for layer in range(config.layers)
            if hasattr(config, "no_rope_every")
        ],
    }
    if getattr(config, "scaling", None) is not None:
        fields = rope.WORDS[config.scaling.kind]
        values = {field: getattr(config.scaling, field) for field in fields}
        values = {field: value for field, value in values.items() if value is not None}
        found["scaling"] = {"kind": config.scaling.kind} | values
    return found


@published
def test_a_published_config_is_understood_as_transformers_does(name):
    config = text(name)
    assert ours(section(config)) == theirs(config)


@published
def test_a_published_config_makes_a_model_of_its_published_size(name):
    shapes = jax.tree.leaves(tiny.abstract(section(text(name))))
    assert sum(math.prod(x.shape) for x in shapes if hasattr(x, "shape")) == ALL[name][1]


@pytest.mark.parametrize(
    "key",
    [
        "head_dim",
        "num_key_value_heads",
        "tie_word_embeddings",
        "rms_norm_eps",
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
    ],
)
@pytest.mark.parametrize(
    "name", ["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B", "Mistral-7B-v0.1", "gemma-3-1b-it"]
)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(name, key):
    config = text(name)
    config.pop(key, None)
    # Not all of these sizes go together, so they are compared before a section is made of them.
    found = configs.read(config, "config.json", skip=["nothing"])
    expected = theirs(config)
    assert {field: found[field] for field in found if field in expected and field != "scaling"} == {
        field: expected[field] for field in found if field in expected and field != "scaling"
    }
    if "window" in found:
        assert found["window"] == next(iter(filter(None, expected["windows"])), None)


@pytest.mark.parametrize("without", [(), CURRENT, FORMER], ids=["both", "former", "current"])
@pytest.mark.parametrize("case", reference.CASES)
def test_what_is_written_is_read_the_same_by_both_releases_and_here(case, without):
    if case.startswith("gpt_oss") and without == CURRENT:
        pytest.skip("transformers 5 has a default in place of the former spelling")
    config = reference.config(case)
    written = configs.written(config, length=64, dtype="float32")
    if written["model_type"] == "olmo3":
        without = [key for key in without if key != "layer_types"]  # which is as old as the family
    if written["model_type"] == "gemma4_text":
        without = [key for key in without if key == "dtype"]
    left = {key: value for key, value in written.items() if key not in without}
    assert json.loads(json.dumps(left)) == left
    expected = ours(config)
    if getattr(config, "query_width", 0) is None:
        expected["scale"] = config.head_dim
    if "scaling" in expected and config.scaling.kind != "linear":
        slow, fast = config.scaling.bounds
        expected["scaling"] |= {"slow": slow, "fast": fast}
    assert theirs(left) == expected
    assert ours(section(left)) == expected


@pytest.mark.skipif(not reference.HAS_TORCH, reason="torch makes the model")
@pytest.mark.parametrize("name", reference.FAMILIES)
def test_a_config_of_a_small_vocabulary_makes_a_model_of_the_same_size(name):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    written = configs.written(tiny.config(name), length=64, dtype="float32")
    config = CONFIG_MAPPING[written["model_type"]].from_dict(written)
    model = AutoModelForCausalLM.from_config(config)
    stored = [x for name, x in model.named_buffers() if name in model.state_dict()]
    sizes = [x.numel() for x in (*model.parameters(), *stored)]
    ours = jax.tree.leaves(eqx.filter(tiny.abstract(tiny.config(name)), is_shape))
    assert sum(sizes) == sum(math.prod(x.shape) for x in ours)


def is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def test_what_a_model_came_with_is_kept_and_what_was_changed_is_written():
    came = json.loads(LLAMA_3_2_1B) | {"_name_or_path": "somewhere", "auto_map": {"AutoModel": "x"}}
    config = section(json.loads(LLAMA_3_2_1B))
    written = configs.written(config, length=64, dtype="float16", like=came)
    assert written["eos_token_id"] == 128001
    assert written["max_position_embeddings"] == 131072
    longer = dataclasses.replace(config.scaling, factor=64.0)  # of 8192 positions
    other = dataclasses.replace(config, scaling=longer)
    further = configs.written(other, length=64, dtype="float16", like=came)
    assert further["max_position_embeddings"] == 64 * 8192
    assert written["torch_dtype"] == written["dtype"] == "float16"
    assert not {"_name_or_path", "auto_map"} & written.keys()


def test_the_two_scales_of_yarn_become_one_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    config = json.loads(QWEN2_5_0_5B) | {
        "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}
    }
    found = section(config).scaling
    above, below = 0.1 * math.log(4) + 1, 0.05 * math.log(4) + 1
    assert found is not None and found.attention_factor == pytest.approx(above / below, rel=1e-12)
    half = json.loads(QWEN2_5_0_5B) | {"rope_scaling": yarn | {"mscale": 1.0}}
    assert (plain := section(half).scaling) is not None and plain.attention_factor is None


def refusal(text: str, **changes: Any) -> str:
    config = {key: x for key, x in (json.loads(text) | changes).items() if x != "gone"}
    with pytest.raises(UserError) as refused:
        configs.read(config, "config.json")
    return str(refused.value)


def test_all_that_would_compute_something_else_is_refused_at_once():
    said = refusal(
        MISTRAL_7B_V0_1,
        hidden_act="gelu",
        attention_bias=True,
        attention_dropout=0.1,
        num_local_experts=8,
        partial_rotary_factor=0.5,
        quantization_config={"quant_method": "gptq", "bits": 4},
        rope_scaling={"type": "dynamic", "factor": 2.0},
        layer_types=["sliding_attention", "full_attention"] * 16,
        hidden_size="gone",
    )
    assert said == (
        "9 problems in config.json:\n"
        "  attention_bias          is true; MistralForCausalLM is computed here with false\n"
        "  attention_dropout       is 0.1; MistralForCausalLM is computed here with 0.0\n"
        "  num_local_experts       is 8; MistralForCausalLM is computed here with null\n"
        "  partial_rotary_factor   is 0.5; MistralForCausalLM is computed here with 1.0\n"
        '  hidden_act              is "gelu"; MistralForCausalLM is computed here with "silu" or '
        '"swish"\n'
        '  quantization_config     is "gptq"; bitsandbytes NF4 and compressed-tensors int4 are '
        "read\n"
        "  hidden_size             is missing\n"
        '  rope_scaling.rope_type  is "dynamic"; there are default, linear, llama3 and yarn\n'
        "  layer_types             has layers that see a window; here every layer sees all"
    )


@pytest.mark.parametrize(
    ("text", "changes", "problem"),
    [
        (
            LLAMA_3_2_1B,
            {"rope_theta": "gone"},
            "rope_theta  is missing: the RoPE base has no default; model.theta sets it",
        ),
        (
            GEMMA_3_1B_IT,
            {"rope_local_base_freq": "gone"},
            "rope_local_base_freq  is missing: the RoPE base has no default; "
            "model.local_theta sets it",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta  is given twice, with different values: rope_parameters.rope_theta "
            "10000.0 and rope_theta 500000.0",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
            "rope_scaling  is another scaling than rope_parameters has",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor  is 0.5; only 1 is computed here",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [8, 8]}},
            "rope_scaling.mrope_section  is [8, 8]; it is not known",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor  is missing: linear scaling needs it",
        ),
        (
            QWEN2_5_0_5B,
            {"use_sliding_window": True},
            "use_sliding_window  is true; Qwen2ForCausalLM is computed here with false",
        ),
        (
            GEMMA_3_1B_IT,
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping  is 30.0; Gemma3ForCausalLM is computed here with null",
        ),
        (
            GEMMA_3_1B_IT,
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 24},
            "layer_types  is not one full_attention in every 1, as the first of them has it",
        ),
        (
            GEMMA_3_1B_IT,
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1000000},
                    "sliding_attention": {"rope_theta": 10000, "type": "linear", "factor": 2.0},
                }
            },
            'rope_parameters.sliding_attention.rope_type  is "linear"; positions in layers that '
            "see a window are not scaled here",
        ),
        (
            GEMMA_3_1B_IT,
            {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
            "layer_types  has 6; it must be a list of one for each of num_hidden_layers (26)",
        ),
        (
            GEMMA_3_1B_IT,
            {"layer_types": {"0": "full_attention"}},
            "layer_types  is a mapping; it must be a list of one for each of num_hidden_layers "
            "(26)",
        ),
        (
            QWEN2_5_0_5B,
            {"rope_parameters": [1]},
            "rope_parameters  is [1]; it must be a mapping",
        ),
        (
            QWEN2_5_0_5B,
            {"rope_theta": {"a": 1}},
            "rope_theta  is a mapping; it must be a number",
        ),
        (
            QWEN2_5_0_5B,
            {"rope_scaling": {"rope_type": "yarn", "factor": "two"}},
            'rope_scaling.factor  is "two"; it must be a number above 0',
        ),
        (
            QWEN2_5_0_5B,
            {"rope_scaling": {"rope_type": ["yarn"]}},
            'rope_scaling.rope_type  is ["yarn"]; there are default, linear, llama3 and yarn',
        ),
        (
            QWEN2_5_0_5B,
            {"vocab_size": "many"},
            'vocab_size  is "many"; it must be a whole number',
        ),
        (
            QWEN2_5_0_5B,
            {"num_key_value_heads": 4},
            "num_key_value_heads  is 4; it must divide heads (14)",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name_and_value(text, changes, problem):
    assert refusal(text, **changes) == f"1 problem in config.json:\n  {problem}"


KNOWN = (
    "Gemma3ForCausalLM with gemma3_text (gemma), Gemma4ForCausalLM with gemma4_text (gemma4), "
    "Gemma4ForConditionalGeneration with gemma4 (gemma4), "
    "GptOssForCausalLM with gpt_oss (gpt_oss), "
    "GraniteForCausalLM with granite (granite), "
    "LlamaForCausalLM with llama (llama), MistralForCausalLM with mistral (mistral), "
    "MixtralForCausalLM with mixtral (mixtral), Olmo2ForCausalLM with olmo2 (olmo2), "
    "Olmo3ForCausalLM with olmo3 (olmo3), Phi3ForCausalLM with phi3 (phi3), "
    "Qwen2ForCausalLM with qwen2 (qwen2), Qwen3ForCausalLM with qwen3 (qwen3), "
    "Qwen3_5ForCausalLM with qwen3_5_text (qwen3_5), "
    "Qwen3_5ForConditionalGeneration with qwen3_5 (qwen3_5), "
    "Qwen3_5MoeForCausalLM with qwen3_5_moe_text (qwen3_5_moe), "
    "Qwen3_5MoeForConditionalGeneration with qwen3_5_moe (qwen3_5_moe), "
    "Qwen3MoeForCausalLM with qwen3_moe (qwen3_moe) and "
    "SmolLM3ForCausalLM with smollm3 (smollm3)"
)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    said = refusal(QWEN2_5_0_5B, architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe")
    assert said == (
        'config.json has architectures Qwen2MoeForCausalLM with model_type "qwen2_moe", which is '
        f"not known here; there are {KNOWN}"
    )
    said = refusal(QWEN2_5_0_5B, architectures="gone", model_type="gone")
    assert said == f"config.json has model_type null, which is not known here; there are {KNOWN}"
    with pytest.raises(UserError) as refused:
        configs.written(tiny.config("gru"), length=8, dtype="float32")
    assert str(refused.value) == f"Hugging Face has no models like gru; it has {KNOWN}"


def test_scaling_of_phi_is_refused_by_name():
    phi = folders.recorded()["phi3"] | {"rope_parameters": None, "rope_theta": 1e4}
    longrope = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    said = refusal(json.dumps(phi), rope_scaling=longrope)
    assert said == (
        "1 problem in config.json:\n"
        '  rope_scaling.rope_type  is "longrope"; only default is computed here'
    )
    said = refusal(LLAMA_3_2_1B, rope_scaling=longrope)
    assert said == (
        "1 problem in config.json:\n"
        '  rope_scaling.rope_type  is "longrope"; there are default, linear, llama3 and yarn'
    )


def test_layers_of_olmo_and_smollm_that_cannot_be_are_refused_by_name():
    olmo, smollm = (json.dumps(folders.recorded()[name]) for name in ("olmo3", "smollm3"))
    bases = {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 50.0}}
    assert refusal(olmo, rope_parameters=bases) == (
        "1 problem in config.json:\n"
        "  rope_parameters.sliding_attention.rope_theta  is 50.0; Olmo3ForCausalLM is computed "
        "here with one base, 500.0"
    )
    assert refusal(smollm, no_rope_layers=[1, 0, 0, 1, 0]) == (
        "1 problem in config.json:\n"
        "  no_rope_layers  is not one 0 in every 2, as the first of them has it"
    )


def test_other_gemmas_are_refused_with_what_there_is():
    name, kind = "Gemma2ForCausalLM", "gemma2"
    assert refusal(GEMMA_3_1B_IT, architectures=[name], model_type=kind) == (
        f'config.json has architectures {name} with model_type "{kind}", which is not known here; '
        f"there are {KNOWN}"
    )


BOTH = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"enable_moe_block": True}, "enable_moe_block  is true; only false"),
        ({"attention_bias": True}, "attention_bias  is true; only false"),
        (
            {"use_bidirectional_attention": "all"},
            'use_bidirectional_attention  is "all"; only null or "vision"',
        ),
        (
            {"vocab_size_per_layer_input": 90},
            "vocab_size_per_layer_input  is 90; it must be vocab_size (96)",
        ),
        (
            {"rope_parameters": {"full_attention": BOTH | {"rope_type": "yarn"}}},
            'rope_parameters.full_attention.rope_type  is "yarn"; there are default and '
            "proportional",
        ),
        (
            {"rope_parameters": {"full_attention": BOTH | {"factor": 8.0}}},
            "rope_parameters.full_attention.factor  is 8.0; only 1 is computed here",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 12}}},
            "per_layer_config  is not head_dim and num_key_value_heads, the same for every global "
            "layer, which are all that differs by layer here",
        ),
    ],
)
def test_what_gemma_4_has_and_is_not_computed_is_refused_by_name(changes, problem):
    recorded = folders.recorded()["gemma4"]
    near = {"sliding_attention": {"rope_theta": 1e4}}
    if "rope_parameters" in changes:
        changes = {"rope_parameters": changes["rope_parameters"] | near}
    problem = problem.replace("only false", "Gemma4ForCausalLM is computed here with false")
    problem = problem.replace("only null", "Gemma4ForCausalLM is computed here with null")
    assert refusal(json.dumps(recorded), **changes) == f"1 problem in config.json:\n  {problem}"


def test_sizes_of_global_layers_of_gemma_4_are_read_in_both_spellings():
    recorded = folders.recorded()["gemma4"]
    assert "per_layer_config" in recorded
    own = {"global_head_dim": 12, "num_global_key_value_heads": 1}
    published = {key: x for key, x in recorded.items() if key != "per_layer_config"} | own
    found = configs.read(published, "config.json")
    assert found == configs.read(recorded, "config.json")
    assert (found["global_head_dim"], found["global_kv_heads"]) == (12, 1)
    without = published | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 0}
    found = configs.read(without | {"vocab_size_per_layer_input": 90}, "config.json")
    assert (found["global_kv_heads"], found["per_layer"]) == (None, None)


def test_a_value_that_is_computed_stays_as_it_came():
    came = folders.recorded()["gemma4"] | {"use_bidirectional_attention": "vision"}
    out = configs.written(tiny.config("gemma4"), length=8, dtype="float32", like=came)
    assert out["use_bidirectional_attention"] == "vision"
    assert "per_layer_config" not in out and "partial_rotary_factor" not in out


def test_a_base_that_the_recipe_gives_need_not_be_in_the_file():
    config = json.loads(LLAMA_3_2_1B)
    del config["rope_theta"]
    assert configs.read(config, "config.json", skip=["theta"])["embed"] == 2048


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    def refused(text: str | None) -> str:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError) as refusal:
            configs.load(tmp_path)
        return str(refusal.value)

    file = tmp_path / "config.json"
    assert refused(None) == (
        f"{tmp_path} has no config.json; a model of Hugging Face has one in its folder"
    )
    assert refused("{]") == (
        f"{file} is not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"
    )
    assert refused("[1]") == f"{file} holds [1]; it must be a mapping"
