"""A language model that was trained goes back into the multimodal folder that it came from."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import windlass
from tests import published
from tests.hub import folders, multimodal
from tests.models import reference
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.hub.names import to_tensors
from windlass.release import check
from windlass.release.export import export

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def case(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def place(case, tmp_path_factory) -> Path:
    """A folder with a model, `base`, and a run of two steps that began with it."""
    place = tmp_path_factory.mktemp("put-back")
    changes = dict(vocab_size=published.VOCAB, max_position_embeddings=256)
    multimodal.write(place / "base", case, **changes)
    published.write_tokenizer(place / "base")
    published.write_chats(place / "chats.jsonl", 8)
    recipe = {
        "model": {"path": str(place / "base")},
        "data": {
            "source": {"kind": "jsonl", "path": str(place / "chats.jsonl")},
            "length": 64,
            "format": "chat",
        },
        "optim": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"shape": "constant"}},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
        "run": {"dir": str(place / "run")},
    }
    windlass.train(recipe)
    return place


def test_an_export_has_the_trained_part_in_place_and_the_rest_as_it_was(place, tmp_path):
    export(place / "run", tmp_path / "out")
    before, after = folders.contents(place / "base"), folders.contents(tmp_path / "out")
    assert before.keys() == after.keys()
    beside = [name for name in before if not name.startswith("model.language_model.")]
    assert {name.split(".")[0] for name in beside} == {"model", "mtp"}
    assert all(np.array_equal(before[name], after[name]) for name in beside)
    trained = [name for name in before if name not in beside]
    assert any(not np.array_equal(before[name], after[name]) for name in trained)
    ours, theirs = (
        json.loads((at / "preprocessor_config.json").read_text())
        for at in (tmp_path / "out", place / "base")
    )
    assert ours == theirs


def test_transformers_loads_it_whole_and_as_a_language_model_and_computes_the_same(place, tmp_path):
    export(place / "run", tmp_path / "out")
    source, tokens = open_on_cpu(place / "run", weights="last", step=None), np.arange(40)[None]
    with source.scope():
        expected = check.logits(source.stored_model()[1], tokens.astype(np.int32))
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    for kind in kinds:
        model, about = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not about["missing_keys"] and not about["mismatched_keys"]
        with torch.no_grad():
            found = model(torch.from_numpy(tokens)).logits.numpy()
        gap = np.abs(found - expected).max()
        print(f"{type(model).__name__}: logits differ by {gap:.1e}")
        assert gap < 1e-5 * np.abs(expected).max()


def test_the_weights_of_an_export_are_taken_again(place, tmp_path):
    export(place / "run", tmp_path / "out")
    source = open_on_cpu(place / "run", weights="last", step=None)
    with source.scope():
        model = source.stored_model()[1]
    stored, ours = folders.contents(tmp_path / "out"), to_tensors(model, source.names)
    for name, value in reference.fused(ours).items():
        assert np.array_equal(stored[name.replace("model.", "model.language_model.", 1)], value)


def test_an_export_without_the_folder_that_has_the_rest_is_refused(place, tmp_path):
    shutil.copytree(place / "run", tmp_path / "run")
    shutil.move(place / "base", place / "away")
    try:
        with pytest.raises(UserError) as error:
            export(tmp_path / "run", tmp_path / "out")
    finally:
        shutil.move(place / "away", place / "base")
    assert str(error.value) == (
        f"{tmp_path / 'run'} trained a part of a model, and the rest of it is where it came from: "
        f"model.path is {place / 'base'}; there is no such folder; put it back there to export "
        "the whole, or export with --as adapter where an adapter was trained"
    )
