"""A vocabulary that grew: new rows begin as the mean of the others, and go to PEFT as well."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import windlass
from tests import published
from tests.hub import folders, peers
from windlass.errors import UserError
from windlass.hub.weights import grown

MORE = 5
live = pytest.mark.skipif(not peers.HAS_PEFT, reason="it is what this is compared with")


@live
@pytest.mark.long
def test_an_adapter_with_resized_embeddings_gives_peft_the_same_logits(tmp_path):
    base, vocab = published.write(tmp_path / "base", "qwen3"), published.VOCAB + MORE
    _trained(base, {"vocab": vocab}, {"whole": ["embed_tokens", "lm_head"]})
    _gives_peft_the_same_logits(base, [*range(vocab - 24, vocab)], vocab)


@live
@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.long), "qwen2"])
def test_rows_of_new_tokens_alone_are_trained_and_give_peft_the_same_logits(name, tmp_path):
    base = published.write(tmp_path / "base", name)  # qwen2 is tied
    ids = [98, published.VOCAB - 1, 97]  # of which the corpus has letters
    before = folders.contents(base)
    rows = {"tokens": ids} | ({"head_tokens": ids[:2]} if "lm_head.weight" in before else {})
    _trained(base, {}, rows)
    after = folders.contents(tmp_path / "merged")
    for weight, own in (("model.embed_tokens.weight", ids), ("lm_head.weight", ids[:2])):
        if weight in before:
            moved = np.flatnonzero(np.any(before[weight] != after[weight], axis=1))
            assert 98 in moved and {*moved} <= {*own}
    _gives_peft_the_same_logits(base, [*range(90, 110), *ids], published.VOCAB)
    recipe = _recipe(base, {}, {"kind": "lora", "rank": 2, **rows, "whole": ["embed_tokens"]})
    with pytest.raises(UserError) as refusal:
        windlass.train(recipe, [f"run.dir={tmp_path / 'both'}"])
    assert str(refusal.value) == (
        f"adapter.tokens is {ids}, and adapter.whole trains all rows of embedding.weight; leave "
        "one of them out"
    )


def _recipe(base: Path, model: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    corpus = base.parent / "corpus.jsonl"
    corpus.write_text(8 * (json.dumps({"text": "ash bay cedar dune elm fern"}) + "\n"))
    return {
        "model": {"path": str(base), **model},
        "adapter": adapter,
        "data": {"source": {"kind": "jsonl", "path": str(corpus)}, "length": 64},
        "optim": {"kind": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
    }


def _trained(base: Path, model: dict[str, Any], adapter: dict[str, Any]) -> None:
    """Beside the base: `adapter` and `merged` of a run, and `second` of one that goes on from it.

    The second learns nothing, and must be the first bit for bit.
    """
    folder = base.parent
    recipe = _recipe(base, model, {"kind": "lora", "rank": 2, **adapter})
    run = windlass.train(recipe, [f"run.dir={folder / 'run'}"]).folder
    found = windlass.export(run, folder / "adapter", check=True)
    assert found.form == "adapter" and found.comparison is not None
    assert found.comparison.difference < 1e-5
    windlass.export(run, folder / "merged", form="merged")

    again = _recipe(base, model, {"kind": "lora", "path": str(folder / "adapter")})
    keys = [f"run.dir={folder / 'again'}", "optim.learning_rate=1e-30", "train.steps=1"]
    windlass.export(windlass.train(again, keys).folder, folder / "second")
    assert _saved(folder / "adapter") == _saved(folder / "second")


def _saved(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: x.tobytes() for name, x in tensors.items()}


def _gives_peft_the_same_logits(base: Path, tokens: list[int], vocab: int) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def logits(model) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.tensor([tokens])).logits.numpy()

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.resize_token_embeddings(vocab)
    there = logits(PeftModel.from_pretrained(plain, base.parent / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(base.parent / "merged", dtype=torch.float32)
    gap = np.abs(there - logits(merged)).max()
    print(f"logits differ by {gap:.1e}")
    assert gap < 1e-5


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
