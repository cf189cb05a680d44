"""What is exported computes elsewhere what the run computes."""

import json
import os
import shutil
from pathlib import Path

import equinox as eqx
import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import windlass
from tests import tiny, trained
from windlass.checkpoint.store import Store, contents
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.evaluation.finished_run import open_on_cpu
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.release import check
from windlass.run_folder import folder as folders
from windlass.starting import origin
from windlass.starting.describe import describe

torch = pytest.importorskip("torch")
TEXT = "Once upon a time, there was a little girl named Mia."


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "stories"
    windlass.export(run, folder)
    return folder


def theirs(folder: Path, tokens: np.ndarray) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def ours(run: Path, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """The logits of the run's last checkpoint."""
    source = open_on_cpu(run, weights="last", step=None)
    with source.scope():
        return check.logits(check.rounded(source.stored_model()[1], dtype), tokens)


def test_transformers_computes_what_the_run_computes(run, exported):
    tokens = check.random_tokens(300)
    expected = ours(run, tokens)
    assert np.abs(theirs(exported, tokens) - expected).max() < 1e-5
    assert np.abs(expected).max() > 0.1
    about = json.loads((exported / "config.json").read_text())
    assert about["architectures"] == ["Qwen3ForCausalLM"]
    assert about["dtype"] == about["torch_dtype"] == "float32"


def test_its_tokenizer_cuts_text_as_the_run_does(run, exported):
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(exported)
    own = vocabularies.load(str(run / "tokenizer"))
    assert found(TEXT, add_special_tokens=False).input_ids == own.encode(TEXT).tolist()
    assert found(TEXT).input_ids == [own.bos, *own.encode(TEXT)]
    assert (found.eos_token_id, found.bos_token_id) == (own.eos, own.bos)


def test_bfloat16_in_several_files_is_the_run_rounded(run, tmp_path):
    done = windlass.export(
        run, tmp_path / "small", dtype="bfloat16", shard_size="40KB", weights="best", check=True
    )
    assert done.comparison is not None and done.comparison.good
    assert done.comparison.difference < 1e-5
    files = sorted((tmp_path / "small").glob("*.safetensors"))
    assert [file.name for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert all(file.stat().st_size < 45_000 for file in files)
    assert {x.dtype for file in files for x in load_file(file).values()} == {
        np.dtype(ml_dtypes.bfloat16)
    }
    tokens = check.random_tokens(300)
    assert np.abs(theirs(tmp_path / "small", tokens) - ours(run, tokens, "bfloat16")).max() < 1e-5


def test_the_sizes_that_a_dry_run_tells_are_those_that_are_written(run, exported, tmp_path):
    told = windlass.export(run, tmp_path / "stories", dry_run=True, push="me/stories")
    assert os.listdir(tmp_path) == []
    sizes = {file.name: file.stat().st_size for file in exported.iterdir()}
    del sizes["windlass.json"]
    pushed = told.files.pop("README.md")  # which names the repository
    assert 0 < pushed - sizes.pop("README.md") < 30
    assert told.files == sizes


def test_a_difference_is_found_and_told(run, exported, tmp_path):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(exported, spoilt)
    about = json.loads((spoilt / "config.json").read_text())
    about["rope_parameters"]["rope_theta"] = about["rope_theta"] = 9000.0
    (spoilt / "config.json").write_text(json.dumps(about))
    settings = json.loads((spoilt / "tokenizer_config.json").read_text())
    (spoilt / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "a"}))
    tokens = check.random_tokens(300)
    own = vocabularies.load(str(run / "tokenizer"))
    found = check.compare(spoilt, None, tokens, ours(run, tokens), own)
    assert not found.good
    told = str(found).split("; ")
    assert told[0].startswith("logits differ by at most ")
    assert told[1:] == [
        "1.0e-04 would be alike",
        f"{check.TEXTS[0]!r} is other tokens there",
        f"a document ends with token {own.encode('a')[0]}, not {own.eos}",
    ]
    assert not windlass.verify(spoilt).good


def test_a_card_has_what_was_trained_and_nothing_of_this_machine(run, exported):
    text = (exported / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    about = yaml.safe_load(header)
    (index,) = about.pop("model-index")
    assert about == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["windlass"],
    }
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (held_out,) = index["results"]
    assert held_out["dataset"] == {
        "name": "held-out rows",
        "type": "held-out",
        "split": "validation",
    }
    assert {one["type"]: one["value"] for one in held_out["metrics"]} == {
        name: records[-1][f"validation_{name}"] for name in ("loss", "perplexity", "accuracy")
    }
    validation = [x["validation_loss"] for x in records if "validation_loss" in x][-1]
    assert f"| validation loss | {validation:.4f} |" in body
    training = [x["loss"] for x in records if "loss" in x][-1]
    assert f"| training loss | {training:.4f} |" in body
    data = contents(run, "4")["identity"]["data"]
    assert f"| data | {data} (hash of the documents) |" in body
    assert "| weights | the last weights, at step 4 of 4 |" in body
    assert 'AutoModelForCausalLM.from_pretrained("stories")' in body
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe["model"]["embed"] == tiny.WIDTHS["embed"]
    assert recipe["data"]["source"]["path"] == trained.CORPUS
    assert str(run.parent.parent) not in text


@pytest.fixture
def gru(tmp_path) -> Path:
    """A run of a family that nobody else has, as it stands at step 0."""
    model = {"family": "gru", **vars(tiny.config("gru"))}
    recipe = trained.recipe() | {"model": model, "tokenizer": {"kind": "byte"}}
    built = Built(describe(recipe, [f"run.dir={tmp_path}/run"]))
    store = Store(tmp_path / "run", say=print)
    store.save(0, {"weights": tiny.model("gru")}, built.identity)
    store.close()
    folders.store(tmp_path / "run", built.run, vocabularies.byte())
    return tmp_path / "run"


def test_a_family_that_nobody_else_has_is_written_by_its_own_names(gru, tmp_path):
    windlass.export(gru, tmp_path / "it")
    tensors = load_file(tmp_path / "it" / "model.safetensors")
    config = tiny.config("gru")
    found = tiny.filled(tiny.abstract(config), {}, tensors)
    assert tiny.apart(found, tiny.model("gru")) == 0
    about = json.loads((tmp_path / "it" / "config.json").read_text())
    assert about == {
        "model_type": "windlass-gru",
        "windlass": {"model": {"family": "gru", **vars(config)}},
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    own = describe(trained.recipe() | {"model": {"path": str(tmp_path / "it")}})
    assert own.run.model == config
    with own.scope():
        built = Built(own)
        found = origin.take(built, "", print)
        state, _ = Programs(built, 1).init(found.arrays)
    assert found.facts[1][0] == "loaded"
    assert eqx.tree_equal(jax.device_get(state.weights), jax.device_get(tiny.model("gru")))
    assert "library_name: windlass\n" in (tmp_path / "it" / "README.md").read_text()
    with pytest.raises(UserError) as error:
        windlass.export(gru, tmp_path / "other", check=True)
    assert str(error.value) == (
        "--check compares with transformers, which has no models like gru; "
        "without --check the export is the same"
    )
    recipe = (gru / folders.RECIPE).read_text()
    (gru / folders.RECIPE).write_text(recipe.replace("adapter: null", "adapter: {kind: lora}"))
    (gru / folders.SEAL).unlink()
    assert windlass.export(gru, tmp_path / "other", dry_run=True).form == "merged"
    with pytest.raises(UserError) as error:
        windlass.export(gru, tmp_path / "other", form="adapter")
    assert str(error.value) == "PEFT has no adapters for models like gru; --as merged has it all"


def test_what_cannot_be_exported_is_refused_before_anything_is_written(run, tmp_path):
    def refused(**options) -> str:
        with pytest.raises(UserError) as error:
            windlass.export(run, tmp_path / "it", **options)
        assert os.listdir(tmp_path) == []
        return str(error.value)

    for form in ("adapter", "merged"):
        assert refused(form=form) == (
            f"{run} trained no adapter; --as model and --as gguf are what there is"
        )
    assert refused(step=3) == f"no checkpoint at step 3 in {run}/checkpoints; there are 0, 2, 4"
    assert refused(weights="ema") == (
        f"{run} has no averaged weights, since its train.ema is null; weights can be last or best"
    )
    assert refused(shard_size="5", private=True) == (
        "2 problems in the call:\n"
        "  shard_size  is 5; it must be a size such as 5GB or 500MB\n"
        "  private     is of what is pushed; push names that"
    )


def test_an_export_that_the_disk_has_no_room_for_is_refused(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError) as error:
        windlass.export(run, tmp_path / "it")
    needed, smaller = (
        sum(windlass.export(run, tmp_path / "it", dtype=dtype, dry_run=True).files.values())
        for dtype in ("float32", "bfloat16")
    )
    assert smaller < 100_000
    assert str(error.value) == (
        f"the export takes {needed / 1024:.1f} KiB, and the disk of {tmp_path}/it has 97.7 KiB "
        "free; make room there, or name another folder with --to; --dtype bfloat16 takes "
        f"{smaller / 1024:.1f} KiB"
    )
    assert os.listdir(tmp_path) == []
