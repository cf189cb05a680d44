"""A run that starts from a model of the hub or in a folder, and what it keeps of it."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import windlass
from tests import published, tiny, trained
from tests.hub import folders as models
from tests.trained import on_weights as recipe
from tests.training.test_loop import Told
from windlass.checkpoint import archive
from windlass.checkpoint.fingerprint import measure
from windlass.checkpoint.store import folder_of
from windlass.config import read
from windlass.config.start import Start
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.hub import config as configs
from windlass.models import qwen3
from windlass.run_folder import folder as folders
from windlass.starting import origin
from windlass.starting.describe import describe

# That of the small run of other tests, so that what is compiled for it is compiled once.
CONFIG = read(qwen3.Config, {"vocab": 300, **tiny.WIDTHS})
HUB, COMMIT = "someone/tiny", "0123456789" * 4
KEYS = ("train.steps=4", "checkpoint.keep=9")
GENERATION = {"temperature": 0.6, "eos_token_id": 256}


def publish(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A small model with a tokenizer, as it would be downloaded; gives its arrays."""
    folder.mkdir(parents=True)
    model = jax.jit(CONFIG.init)(jax.random.key(seed))
    published.save_weights(folder, model, qwen3.NAMES, shard_bytes=50_000)
    config = configs.written(CONFIG, length=90, dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    vocabularies.byte().save(folder)
    return models.contents(folder)


def refused(*keys: str, **model) -> str:
    return trained.refusal(recipe(**model), keys)


@pytest.fixture
def there(tmp_path, monkeypatch) -> Path:
    """The cache of the hub's own library, with one model in it."""
    from huggingface_hub import constants

    place = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    model = place / f"models--{HUB.replace('/', '--')}"
    publish(model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return place


@pytest.fixture
def corpus(here) -> Path:
    trained.write_corpus(here / trained.CORPUS, trained.DOCUMENTS)
    return here


@pytest.mark.long
def test_a_run_starts_from_a_folder_and_never_needs_it_again(corpus):
    held = publish(Path("source"))
    told = Told("run.dir=mine", *KEYS, recipe=recipe(path="source"))
    assert "start        source\nloaded       all " in told.text
    mine = told.trained.folder
    stored = folders.stored(mine)
    assert stored["model"]["family"] == "qwen3" and stored["model"]["vocab"] == 300
    assert stored["tokenizer"]["path"] == "source"
    assert {key: x for key, x in stored["start"].items() if x is not None} == {"path": "source"}
    first = archive.manifest(folder_of(mine) / "0")["arrays"]
    there = measure(jax.tree.map(jax.numpy.asarray, held))
    assert first["weights.embedding.weight"]["fingerprint"] == there["model.embed_tokens.weight"]
    kept = mine / folders.MODEL
    assert json.loads((kept / "generation_config.json").read_text()) == GENERATION
    assert (kept / "config.json").read_text() == Path("source/config.json").read_text()
    origin = json.loads((kept / "start.json").read_text())
    assert origin["path"] == "source" and len(origin["fingerprint"]) == 64

    shutil.rmtree("source")
    shutil.rmtree(folder_of(mine) / "4")
    again = Told("run.dir=mine", *KEYS, recipe=recipe(path="source"))
    assert re.search("resuming from step [23] of 4 in mine", again.text)
    assert windlass.evaluate(mine)["step"] == 4
    assert len(windlass.generate(mine, "Once", tokens=2)) == 1
    assert windlass.delete(mine) == [] and not mine.exists()


@pytest.mark.long
def test_a_residual_starts_afresh_on_a_model_that_has_none(corpus):
    held = publish(Path("source"))
    wide = recipe(path="source") | {"residual": {"kind": "mhc", "streams": 2}}
    told = Told("run.dir=mine", "train.steps=1", "optim.learning_rate=1e-30", recipe=wide)
    of_branch = 2 * 2 + 2 + 2 + 3 + 8 * 2 * 32  # res, pre, post, alpha and phi
    assert f"new          {2 * 2 * of_branch:,} parameters of the residual\n" in told.text
    first = archive.manifest(folder_of(told.trained.folder) / "0")["arrays"]
    there = measure(jax.tree.map(jax.numpy.asarray, held))
    assert first["weights.embedding.weight"]["fingerprint"] == there["model.embed_tokens.weight"]
    plain = Told(
        "run.dir=other", "train.steps=1", "optim.learning_rate=1e-30", recipe=recipe(path="source")
    )
    found, expected = (windlass.evaluate(each.trained.folder)["loss"] for each in (told, plain))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_model_of_the_hub_is_taken_from_its_cache_at_a_commit_that_stays(corpus, there):
    first = describe(recipe(hub=HUB))
    start = first.run.start
    assert start is not None and (start.hub, start.revision) == (HUB, COMMIT)
    assert first.run.model == CONFIG
    Told(*KEYS, recipe=recipe(hub=HUB))
    newer = "f" * 40
    model = there / f"models--{HUB.replace('/', '--')}"
    shutil.copytree(model / "snapshots" / COMMIT, model / "snapshots" / newer)
    (model / "refs" / "main").write_text(newer)
    assert describe(recipe(hub=HUB)).folder == first.folder
    moved = describe(recipe(hub=HUB, revision="main")).run.start
    assert moved is not None and moved.revision == newer
    shutil.rmtree(there)
    again = Told(*KEYS, recipe=recipe(hub=HUB))
    assert f"this run is finished: step 4 of 4 in {first.folder}" in again.text
    assert describe(recipe(hub=HUB, revision="main")).folder == first.folder


def test_fields_beside_change_the_model_and_the_command_line_names_another(corpus, there):
    publish(Path("source"))
    run = describe(recipe(hub=HUB), ["model.path=source", "model.theta=2e4"]).run
    assert run.start is not None and run.start.path == "source" and run.start.hub is None
    assert run.model.theta == 2e4 and run.model.embed == CONFIG.embed


def test_a_tokenizer_that_the_recipe_names_is_used(corpus):
    publish(Path("source"))
    Path("source/tokenizer.json").unlink()
    run = describe(recipe(path="source"), ["tokenizer=byte"]).run
    assert run.tokenizer.kind == "byte"
    assert refused(path="source") == (
        "source has no tokenizer.json, the file that every current tokenizer is stored in; "
        "tokenizer: {kind: file, path: ...} names another"
    )


def test_a_start_that_cannot_be_is_refused(corpus, there):
    head = "1 problem in the recipe:\n"
    assert refused(path="nowhere") == "model.path is nowhere; there is no such folder"
    # It may be gone when a run that was killed before its first checkpoint starts again.
    with pytest.raises(UserError, match="^model.path is nowhere; there is no such folder$"):
        origin.check(Start(path="nowhere"))
    assert refused(path="source", hub=HUB) == (
        f"{head}  model.hub  is {HUB}; path says where the weights are, too: name one of them"
    )
    assert refused(path="source", revision="main") == (
        f"{head}  model.revision  is main; it belongs to hub, and this is path"
    )
    assert refused(hub=HUB, weights="best") == (
        f"{head}  model.weights  is best; it belongs to run, and this is hub"
    )
    Path("empty").mkdir()
    assert refused(path="empty") == (
        "model.path is empty, which has no config.json: it is no Hugging Face model"
    )
    Path("empty/adapter_config.json").touch()
    assert refused(path="empty") == (
        "model.path is empty, which is an adapter; adapter.path names one, and model.hub or "
        "model.path the model that it was made for"
    )
    Path("empty/recipe.yaml").touch()
    assert refused(path="empty") == "model.path is empty, which is a run; model.run names one"


def test_weights_that_do_not_fit_are_refused_before_the_data_is_read(corpus):
    publish(Path("source"))
    for file in Path("source").glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError) as refusal:
        windlass.train(recipe(path="source"))
    assert str(refusal.value).startswith("source has no weights; they are read from")
    assert not list(Path("runs").glob("*/recipe.yaml"))
