"""GGUF files hold what the run computes, as gguf's reader and transformers read them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import windlass
from tests import tiny
from tests.release import stored
from tests.release.test_export import ours
from windlass.config import tree
from windlass.data import vocabulary as vocabularies
from windlass.layers.rotary import Scaling
from windlass.release import check

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

# But for what llama.cpp does not have: no field has its default.
SIZES = dict(vocab=300, embed=64, mlp=96, heads=4, kv_heads=2, head_dim=10)
YARN = Scaling(kind="yarn", factor=4.0, original_length=7, attention_factor=1.2)
CHANGED: dict[str, dict] = {
    "gemma": SIZES | dict(query_width=None),
    "llama": SIZES,
    "mistral": SIZES | dict(scaling=YARN, window=40),
    "qwen2": SIZES | dict(scaling=YARN, head_dim=16),
    "qwen3": SIZES | dict(scaling=YARN, attention_bias=False),
}
ARCHITECTURES = dict(gemma="gemma3", llama="llama", mistral="llama", qwen2="qwen2", qwen3="qwen3")
TEXT = "Once upon a time, there was a girl; she had 1234 cats."


def section(family: str, **changes: Any) -> dict:
    config = dataclasses.replace(tiny.config(family), **CHANGED[family] | changes)
    return {"family": family, **tree(config)}


@pytest.fixture(scope="module")
def learned() -> vocabularies.Vocabulary:
    return vocabularies.learn([TEXT] * 3, 280)


@pytest.fixture(scope="module", params=sorted(CHANGED))
def of_family(request, tmp_path_factory, learned) -> tuple[str, Path]:
    """A family, and a run of it."""
    place = tmp_path_factory.mktemp(request.param)
    return request.param, stored.run(place, learned, model=section(request.param))


def opened(folder: Path) -> Any:
    (file,) = folder.glob("*.gguf")
    return gguf.GGUFReader(file)


def theirs(folder: Path, about: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits of transformers; what it does not read from a GGUF file is of config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (file,) = folder.glob("*.gguf")
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name)
    unread = ["head_dim", "attention_bias", "mlp_bias", "query_pre_attn_scalar", "rope_parameters"]
    for key in [*unread, *(["layer_types"] if about["model_type"] == "gemma3_text" else [])]:
        if key in about:
            setattr(config, key, about[key])
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def test_transformers_computes_from_the_file_what_the_run_computes(of_family, tmp_path):
    name, run = of_family
    windlass.export(run, tmp_path / "plain")
    about = json.loads((tmp_path / "plain" / "config.json").read_text())
    tokens = check.random_tokens(300)[:, :40]
    expected = ours(run, tokens)
    done = windlass.export(run, tmp_path / "it", form="gguf", check=True)
    assert done.comparison is not None and done.comparison.good, done.comparison
    assert np.abs(theirs(tmp_path / "it", about, tokens) - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "it").iterdir()}
    del sizes["windlass.json"]
    assert sizes == done.files
    reader = opened(tmp_path / "it")
    assert reader.get_field("general.architecture").contents() == ARCHITECTURES[name]
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"F32"}
