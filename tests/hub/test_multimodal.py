"""The language model of a multimodal checkpoint is read from it, and the rest is left alone."""

import numpy as np
import pytest

from tests.hub import multimodal
from tests.hub.test_round_trip import MESHES, built, logits, taken
from tests.models import reference
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.starting import origin

pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.fixture(
    scope="module", params=["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.long)]
)
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(case, tmp_path_factory):
    return multimodal.write(tmp_path_factory.mktemp("multimodal") / "came", case)


def test_logits_are_those_of_transformers_for_the_language_model_of_a_multimodal_folder(
    case, folder
):
    config, here = reference.config(case), built(folder, MESHES["alone"])
    assert here.run.model == config
    with here.described.scope():
        gap = np.abs(logits(taken(here), config) - reference.recorded(case).logits).max()
    print(f"logits differ by {gap:.1e}")
    assert gap < 1e-5


def test_gemma_4_is_read_and_its_towers_and_unused_keys_are_left_alone(tmp_path):
    folder, config = multimodal.write_gemma4(tmp_path / "came"), reference.config("gemma4")
    here = built(folder, MESHES["2x2x2"])
    assert here.run.model == config
    with here.described.scope():
        gap = np.abs(logits(taken(here), config) - reference.recorded("gemma4").logits).max()
        facts = dict(origin.take(here, "", print).facts)
    assert gap < 1e-5
    names = list(multimodal.gemma4().state_dict())
    vision, audio = (
        sum(name.startswith(f"model.{what}_tower.") for name in names)
        for what in ("vision", "audio")
    )
    assert facts["left alone"] == (
        f"tensors: {vision} of the vision tower (model.vision_tower.*), "
        "1 of the projection of images (model.embed_vision.*), "
        f"{audio} of the audio tower (model.audio_tower.*), "
        "1 of the projection of audio (model.embed_audio.*) and "
        "2 of layers that share keys and values "
        "(model.language_model.layers.3.self_attn.k_*, ...)"
    )
    out = configs.written(config, length=14, dtype="float32", like=configs.load(folder))
    assert out["architectures"] == ["Gemma4ForConditionalGeneration"]
    assert configs.read(out, "out") == configs.read(configs.load(folder), "came")


def test_what_is_left_alone_is_named_when_a_run_starts(case, folder):
    here = built(folder, MESHES["alone"])
    with here.described.scope():
        facts = dict(origin.take(here, "", print).facts)
    towers = sum(name.startswith("model.visual.") for name in multimodal.module(case).state_dict())
    assert facts["left alone"] == (
        f"tensors: {towers} of the vision tower (model.visual.*) and "
        "1 of multi-token prediction (mtp.*)"
    )


def test_the_config_goes_back_into_that_of_the_whole_model(case, folder):
    came, config = configs.load(folder), reference.config(case)
    out = configs.written(config, length=14, dtype="float32", like=came)
    assert out["vision_config"] == came["vision_config"]
    assert out["architectures"] == came["architectures"]
    assert configs.read(out, "out") == configs.read(came, "came")
    rope = came["text_config"]["rope_parameters"] | {"mrope_section": [1, 1, 0]}
    came["text_config"]["rope_parameters"] = rope
    out = configs.written(config, length=14, dtype="float32", like=came)
    assert out["text_config"]["rope_parameters"]["mrope_section"] == [1, 1, 0]


def test_a_tensor_that_is_neither_of_the_language_model_nor_known_beside_it_is_refused(folder):
    from windlass.hub.multimodal import of_language

    names = dict.fromkeys(
        ["model.audio.weight", "model.visual.x", "model.language_model.norm.weight"]
    )
    assert list(of_language(names, folder)) == ["model.audio.weight", "model.norm.weight"]


def test_layers_that_are_not_in_turn_are_refused_by_name(folder):
    came = configs.load(folder)
    came["text_config"]["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UserError) as error:
        configs.read(came, "config.json")
    assert str(error.value) == (
        "1 problem in config.json:\n  layer_types  is not one full_attention in every 1, as the "
        "first of them has it"
    )
