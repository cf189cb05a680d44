"""A vocabulary that grew: new rows begin as the mean of the others, and go to PEFT as well."""

import json
from pathlib import Path

import numpy as np
import pytest

import windlass
from tests import published
from tests.hub import folders, peers
from windlass.errors import UserError
from windlass.hub.weights import grown

MORE = 5


@pytest.mark.long
@pytest.mark.skipif(not peers.HAS_PEFT, reason="it is what this is compared with")
def test_an_adapter_with_resized_embeddings_gives_peft_the_same_logits(tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, corpus = published.write(tmp_path / "base", "qwen3"), tmp_path / "corpus.jsonl"
    corpus.write_text(8 * (json.dumps({"text": "ash bay cedar dune elm fern"}) + "\n"))
    vocab = published.VOCAB + MORE
    recipe = {
        "model": {"path": str(base), "vocab": vocab},
        "adapter": {"kind": "lora", "rank": 2, "whole": ["embed_tokens", "lm_head"]},
        "data": {"source": {"kind": "jsonl", "path": str(corpus)}, "length": 64},
        "optim": {"kind": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
    }
    run = windlass.train(recipe, [f"run.dir={tmp_path / 'run'}"]).folder
    found = windlass.export(run, tmp_path / "adapter", check=True)
    assert found.form == "adapter" and found.comparison is not None
    assert found.comparison.difference < 1e-5
    windlass.export(run, tmp_path / "merged", form="merged")

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.arange(vocab - 24, vocab)[None]).logits.numpy()

    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs.resize_token_embeddings(vocab)
    there = logits(PeftModel.from_pretrained(theirs, tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    print(f"logits differ by {np.abs(there - logits(merged)).max():.1e}")
    assert np.abs(there - logits(merged)).max() < 1e-5

    again = {"kind": "lora", "path": str(tmp_path / "adapter")}
    keys = [f"run.dir={tmp_path / 'again'}", "optim.learning_rate=1e-30", "train.steps=1"]
    windlass.train({**recipe, "adapter": again}, keys)
    one, other = (_saved(tmp_path / name) for name in ("adapter", "second"))
    assert one == other


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])  # of which the second is tied
def test_rows_of_new_tokens_alone_are_trained_and_give_peft_the_same_logits(name, tmp_path):
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base, corpus = published.write(tmp_path / "base", name), tmp_path / "corpus.jsonl"
    corpus.write_text(8 * (json.dumps({"text": "ash bay cedar dune elm fern"}) + "\n"))
    ids = [98, published.VOCAB - 1, 97]  # of which the corpus has letters
    before = folders.contents(base)
    rows = {"tokens": ids} | ({"head_tokens": ids[:2]} if "lm_head.weight" in before else {})
    recipe = {
        "model": {"path": str(base)},
        "adapter": {"kind": "lora", "rank": 2, **rows},
        "data": {"source": {"kind": "jsonl", "path": str(corpus)}, "length": 64},
        "optim": {"kind": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
    }
    run = windlass.train(recipe, [f"run.dir={tmp_path / 'run'}"]).folder
    found = windlass.export(run, tmp_path / "adapter", check=True)
    assert found.form == "adapter" and found.comparison is not None
    assert found.comparison.difference < 1e-5
    windlass.export(run, tmp_path / "merged", form="merged")
    after = folders.contents(tmp_path / "merged")
    for weight, own in (("model.embed_tokens.weight", ids), ("lm_head.weight", ids[:2])):
        if weight in before:
            moved = np.flatnonzero(np.any(before[weight] != after[weight], axis=1))
            assert 98 in moved and {*moved} <= {*own}

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor([[*range(90, 110), *ids]])).logits.numpy()

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    there = logits(theirs.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    print(f"{name}: logits differ by {np.abs(there - logits(merged)).max():.1e}")
    assert np.abs(there - logits(merged)).max() < 1e-5

    again = {"kind": "lora", "path": str(tmp_path / "adapter")}
    keys = [f"run.dir={tmp_path / 'again'}", "optim.learning_rate=1e-30", "train.steps=1"]
    windlass.train({**recipe, "adapter": again}, keys)
    one, other = (_saved(tmp_path / name) for name in ("adapter", "second"))
    assert one == other
    both = recipe["adapter"] | {"whole": ["embed_tokens"]}
    with pytest.raises(UserError) as refusal:
        windlass.train({**recipe, "adapter": both}, [f"run.dir={tmp_path / 'both'}"])
    assert str(refusal.value) == (
        f"adapter.tokens is {ids}, and adapter.whole trains all rows of embedding.weight; leave "
        "one of them out"
    )


def _saved(folder: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    if folder.name == "second":
        windlass.export(folder.parent / "again", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: x.tobytes() for name, x in tensors.items()}


def test_parts_of_a_grown_tensor_are_those_of_the_whole():
    class Tensor:
        type = "F32"

        def __init__(self, values):
            self.values, self.shape = values, values.shape

        def __getitem__(self, index):
            return self.values[index]

    values = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    larger = grown(Tensor(values), (10, 4))
    whole = larger[:]
    assert np.array_equal(whole[:7], values)
    assert np.abs(whole[7:] - values.mean(axis=0)).max() < 1e-6
    for rows in (slice(0, 5), slice(5, 10), slice(8, 10), slice(None)):
        for columns in (slice(None), slice(1, 3)):
            assert np.array_equal(larger[rows, columns], whole[rows, columns])
    same = Tensor(values)
    assert (
        grown(same, (7, 4)) is same and grown(same, (9, 5)) is same and grown(same, (6, 4)) is same
    )
