"""Reward models: trained from a language model, exported as a classifier with one label."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

import windlass
from tests import published
from tests.models import reference
from windlass.checkpoint.store import contents
from windlass.data.pack import Sequences
from windlass.errors import UserError
from windlass.objectives.reward import Objective

CENTER = 0.05
WORDS = "ash bay cedar dune elm fern gale heath iris jade".split()
live = pytest.mark.skipif(not reference.HAS_TORCH, reason="it is what this is compared with")


def pairs() -> list[dict[str, str]]:
    return [{"prompt": word, "chosen": word.upper(), "rejected": f"{word}?"} for word in WORDS]


def recipe(place: Path, **sections) -> dict:
    return {
        "model": {"path": str(place / "base")},
        "data": {
            "source": {"kind": "jsonl", "path": str(place / "pairs.jsonl")},
            **{"format": {"kind": "pairs", "style": "text"}, "length": 48, "validation": 0.4},
        },
        "objective": {"kind": "reward", "center": CENTER},
        "optim": {"kind": "adamw", "learning_rate": 1e-2},
        "train": {"steps": 2, "batch": 2},
        "device": {"kind": "cpu", "count": 1},
        **sections,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run of two steps from a language model whose head is another matrix than its embedding."""
    place = tmp_path_factory.mktemp("reward")
    published.write(place / "base", "qwen3")
    (place / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs()))
    windlass.train(recipe(place), [f"run.dir={place / 'run'}"])
    return place


@live
@pytest.mark.long
def test_an_export_is_a_classifier_whose_scores_give_the_loss_of_the_run(place, tmp_path):
    import torch
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path / "model"
    found = windlass.export(place / "run", folder, check=True)
    assert found.comparison is not None and found.comparison.good, found.comparison
    print(found.comparison)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1 and model.config.architectures == [type(model).__name__]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = windlass.data(place / "run/recipe.yaml").split("validation")
    assert isinstance(held_out, Sequences)

    def score(text: str):
        # All but the end, which stands behind every document and is not read.
        return model(torch.tensor([tokenizer(text).input_ids])).logits[0, 0]

    losses = []
    for number in held_out.examples:
        one = pairs()[number]
        better, worse = (score(one["prompt"] + one[name]) for name in ("chosen", "rejected"))
        losses.append(-logsigmoid(better - worse) + CENTER * (better + worse) ** 2)
    expected = float(torch.stack(losses).detach().mean())
    measured = windlass.evaluate(place / "run")["loss"]
    print(f"the loss differs by {abs(measured / expected - 1):.1e} of it")
    assert measured == pytest.approx(expected, rel=1e-6)


def test_an_export_is_read_back_and_goes_on(place, tmp_path):
    folder = windlass.export(place / "run", tmp_path / "model").folder
    again = recipe(place, model={"path": str(folder)})
    keys = [f"run.dir={tmp_path / 'again'}", "optim.learning_rate=1e-30", "train.steps=1"]
    windlass.train(again, keys)
    before, after = (windlass.evaluate(run)["loss"] for run in (place / "run", tmp_path / "again"))
    assert after == pytest.approx(before, rel=1e-6)
    about = json.loads((folder / "config.json").read_text())
    assert about["architectures"] == ["Qwen3ForSequenceClassification"]
    assert about["id2label"] == {"0": "LABEL_0"} and about["label2id"] == {"LABEL_0": 0}
    card = (folder / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "vllm" not in card


@pytest.mark.long
def test_with_an_adapter_the_scores_are_trained_too_and_merged_into_one_model(place, tmp_path):
    lora = {"kind": "lora", "rank": 2}
    run = tmp_path / "run"
    windlass.train(recipe(place, adapter=lora), [f"run.dir={run}"])
    arrays = contents(run, "2")["arrays"]
    assert "weights.output.weight" in arrays and "weights.embedding.weight" not in arrays
    found = windlass.export(run, tmp_path / "merged", form="merged", check=reference.HAS_TORCH)
    assert found.comparison is None or found.comparison.good


def refusal(call, *given, **keys) -> str:
    with pytest.raises(UserError) as error:
        call(*given, **keys)
    return str(error.value)


def test_what_needs_a_next_token_is_refused(place, tmp_path):
    run = place / "run"
    assert refusal(windlass.generate, run, "Once") == (
        f"{run} cannot generate: it is a reward model, which scores answers and predicts no token; "
        f"`windlass evaluate {run}` measures its loss"
    )
    assert refusal(windlass.export, run, tmp_path / "gguf", form="gguf") == (
        f"{run} is a reward model, whose head llama.cpp has no name for; without --as gguf, the "
        "files are ones that transformers reads"
    )
    sampled = recipe(place, train={"steps": 2, "batch": 2, "sample": "Once"})
    assert refusal(windlass.train, sampled, [f"run.dir={tmp_path / 'sampled'}"]) == (
        "1 problem in the recipe and the command line:\n"
        "  train.sample  is Once; generation needs an LM head, and the model of objective reward "
        "has scores instead: leave it out"
    )


def test_a_family_without_a_head_that_others_know_is_refused(place, tmp_path):
    gru = {"family": "gru", "vocab": 257, "embed": 16, "state": 8, "layers": 1}
    said = refusal(windlass.train, recipe(place, model=gru), [f"run.dir={tmp_path / 'run'}"])
    assert said.endswith(
        "  objective  is reward, which does not fit family gru: it has no LM head whose place a "
        "head of scores could take"
    )
    with pytest.raises(ValueError, match="center is -1.0; it is a factor, 0 or more"):
        Objective(center=-1.0)


def test_scores_are_read_at_the_last_token_of_each_document():
    from windlass.objectives.reward import _is_last

    document = jnp.array([[0, 0, 1, 1, 1, -1], [0, 1, 2, 3, 3, 3]])
    assert _is_last(document).astype(int).tolist() == [
        [0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
