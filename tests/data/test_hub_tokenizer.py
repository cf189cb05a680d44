"""The tokenizer of a model on the hub, from the hub's cache; and what is said without either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from tests.prepared import tokenized
from windlass.data import Data
from windlass.data import vocabulary as vocabularies
from windlass.data.tokenizer import Tokenizer
from windlass.run_folder import folder as folders
from windlass.sources.example import Source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = Source(name="legal", column="question")
DATA = Data(source=SOURCE, length=64)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> vocabularies.Vocabulary:
    """A tokenizer where the hub's client would have put it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub/models--some--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(COMMIT)
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    learned = vocabularies.learn(["the question of a landlord"] * 9, 300)
    learned.save(place / "snapshots" / COMMIT)
    return learned


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_text_is_read_as_the_model_on_the_hub_reads_it(cached, revision: str | None):
    asked = Tokenizer(kind="hub", hub="some/model", revision=revision)
    prepared = tokenized(DATA, asked, console=Console(quiet=True))
    text = SOURCE[3]["text"]
    assert prepared.vocabulary.encode(text).tolist() == cached.encode(text).tolist()
    assert prepared.vocabulary.eos == cached.eos


def test_a_run_that_has_started_needs_the_hub_no_more(cached, tmp_path: Path):
    asked = Tokenizer(kind="hub", hub="some/model")
    assert folders.tokenizer(tmp_path, asked) == asked
    cached.save(tmp_path / folders.TOKENIZER)
    own = folders.tokenizer(tmp_path, asked)
    assert own == Tokenizer(kind="file", path=str(tmp_path / folders.TOKENIZER))
    assert vocabularies.load(str(own.path)).fingerprint == cached.fingerprint


def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "model: {family: llama, vocab: 300, embed: 32, mlp: 64, layers: 1, heads: 2, kv_heads: 2, "
        "head_dim: 16, theta: 1e4}\n"
        "tokenizer: {hub: some/model}\n"
        "data: {source: {kind: example, name: legal, column: question}, length: 64}\n"
        "optim: {kind: adamw, learning_rate: 1e-3}\n"
        "train: {steps: 1, batch: 1}\ndevice: cpu\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE")
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "windlass", "data", "mine.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    begin, _, end = done.stderr.partition(" (")
    assert begin == "tokenizer.hub is some/model; the hub cannot be reached from here"
    assert end.endswith(
        f"), and it is not in {tmp_path / 'hub'}, which has no model. Where there is a connection, "
        "`hf download some/model` fills that folder, which can be copied here, and with "
        "--local-dir FOLDER makes one that a recipe names by its path\n"
    )
