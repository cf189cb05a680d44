"""What came from `transformers` and was trained here goes back there, whole, beside or merged."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

import windlass
from tests.hub.folders import contents
from tests.release.conftest import SPECIAL, row
from tests.release.test_export import ours, theirs
from windlass.data import vocabulary as vocabularies
from windlass.errors import UserError
from windlass.release import check
from windlass.release.export import Export, Options
from windlass.starting import origin

torch = pytest.importorskip("torch")
TOKENS = check.random_tokens(259)


def text_of(folder: Path) -> str:
    """Everything in a folder that a person reads."""
    return "".join(path.read_text() for path in folder.iterdir() if path.suffix in (".md", ".json"))


def test_a_whole_model_goes_back_as_it_came_but_for_what_was_learned(tuned, tmp_path):
    from transformers import AutoTokenizer

    done = windlass.export(tuned, tmp_path / "mine", shard_size="8KB", check=True)
    assert done.form == "model" and done.comparison is not None
    assert done.comparison.good and done.comparison.difference < 1e-5
    expected = ours(tuned, TOKENS, "bfloat16")
    assert np.abs(theirs(tmp_path / "mine", TOKENS) - expected).max() < 1e-5

    came, went = tuned.parent / "elsewhere", tmp_path / "mine"
    before, after = contents(came), contents(went)
    assert before.keys() == after.keys()  # a head that is shared is in neither
    assert {x.dtype.name for x in after.values()} == {"bfloat16"}
    assert all(np.any(before[name] != after[name]) for name in before)
    about, base = (json.loads((x / "config.json").read_text()) for x in (went, came))
    assert {k: about[k] for k in base if k != "transformers_version"} == {
        k: x for k, x in base.items() if k != "transformers_version"
    }
    said = json.loads((went / "generation_config.json").read_text())
    assert (said["temperature"], said["do_sample"]) == (0.7, True)
    assert said["eos_token_id"] == [256, 258]  # as it came, and as its chats end

    found, own = AutoTokenizer.from_pretrained(went), vocabularies.load(str(tuned / "tokenizer"))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rendered = found.apply_chat_template(chat, tokenize=False)
    assert own.chat is not None and rendered == own.chat.render(chat)
    assert rendered.count(SPECIAL[0]) == 2
    assert found(rendered, add_special_tokens=False).input_ids == own.read(rendered).tolist()
    settings = json.loads((went / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # which transformers 4 knows
    assert str(tuned.parent) not in text_of(went)


def test_an_adapter_is_what_peft_loads_beside_the_model_it_came_from(adapted, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = windlass.export(adapted, tmp_path / "mine", check=True)
    assert done.form == "adapter" and done.comparison is not None
    assert done.comparison.good and done.comparison.difference < 1e-5
    assert sorted(done.files) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    came = adapted.parent / "elsewhere"
    base = AutoModelForCausalLM.from_pretrained(came, dtype=torch.float32)
    with torch.no_grad():
        plain = base(torch.from_numpy(TOKENS).long()).logits.numpy()
        model = PeftModel.from_pretrained(base, tmp_path / "mine")
        found = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    expected = ours(adapted, TOKENS)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - plain).max() > 1e-3  # it has learned something
    assert os.listdir(tmp_path) == ["mine"]
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "library_name: peft\n" in card and "base_model" not in card
    assert 'PeftModel.from_pretrained(base, "mine")' in card
    assert "--max-lora-rank 8 " in card
    assert str(adapted.parent) not in card


@pytest.mark.long
def test_an_adapter_can_be_merged_into_the_model(adapted, tmp_path):
    for dtype in ("float32", "bfloat16"):
        done = windlass.export(adapted, tmp_path / dtype, form="merged", dtype=dtype, check=True)
        assert done.comparison is not None and done.comparison.difference < 1e-5
    assert np.abs(theirs(tmp_path / "float32", TOKENS) - ours(adapted, TOKENS)).max() < 1e-5
    before, after = contents(adapted.parent / "elsewhere"), contents(tmp_path / "float32")
    assert before.keys() == after.keys()
    changed = {name for name in before if np.any(before[name] != after[name])}
    targets = re.compile(r"(q|gate|up|down)_proj\.weight$")
    assert changed == {name for name in before if targets.search(name)}


@pytest.mark.long
def test_an_adapter_that_peft_made_goes_on_from_its_own_loss_and_gradient(adapted, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    came = adapted.parent / "elsewhere"
    torch.manual_seed(1)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(came, dtype=torch.float32),
        LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "from")
    rows = [row(number) for number in range(16)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    recipe = {
        "model": {"path": str(came)},
        "adapter": {"kind": "lora", "path": str(tmp_path / "from")},
        "data": {
            "source": {"kind": "jsonl", "path": str(tmp_path / "chats.jsonl")},
            "length": 192,
            "format": "chat",
        },
        "optim": {"kind": "adamw", "learning_rate": 1e-2, "schedule": {"shape": "constant"}},
        "train": {"epochs": 2, "batch": 4},
        "telemetry": {"every": 1},
        "device": {"kind": "cpu", "count": 1},
        "run": {"dir": str(tmp_path / "run")},
    }
    windlass.train(recipe)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (x for x in map(json.loads, lines) if "gradient_norm" in x)

    # Every row is in the one batch of an epoch: four chats in each there, one at a time here.
    tokenizer, total, count = AutoTokenizer.from_pretrained(came), torch.zeros(()), 0
    for one in rows:
        whole = tokenizer.apply_chat_template(one["messages"], return_dict=False)
        answer = f"{one['messages'][1]['content']}<|im_end|>\n"
        answer = tokenizer(answer, add_special_tokens=False).input_ids
        logits = model(torch.tensor([whole])).logits[0]
        told = slice(len(whole) - len(answer), len(whole) - 1)  # but for the line's end
        losses = torch.nn.functional.cross_entropy(
            logits[told.start - 1 : told.stop - 1], torch.tensor(whole[told]), reduction="sum"
        )
        total, count = total + losses, count + told.stop - told.start
    mean = total / count
    mean.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert first["loss"] == pytest.approx(mean.item(), rel=1e-4)
    assert first["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert second["loss"] < first["loss"]


@pytest.mark.long
def test_what_is_pushed_names_no_folder_of_this_machine(adapted, tmp_path):
    for push, base in ((None, str(adapted.parent / "base")), ("me/mine", "base")):
        made = Export(adapted, tmp_path / "mine", Options(push=push), Console())
        assert made.base == base


def test_an_adapter_that_goes_on_belongs_to_the_model_that_the_first_run_began_with(
    adapted, tmp_path
):
    again = Path(shutil.copytree(adapted, tmp_path / "again"))
    recipe = yaml.safe_load((again / "recipe.yaml").read_text())
    recipe["start"] = {"run": str(adapted), "weights": "last"}
    (again / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (again / "files.json").unlink()
    made = Export(again, tmp_path / "mine", Options(), Console())
    run, base = made.source.run, str(adapted.parent / "base")
    (adapter,) = run.adapter
    merged = dataclasses.replace(run, adapter=(dataclasses.replace(adapter, rank=5),))
    for kept, expected in ((run, base), (merged, None)):
        shutil.rmtree(again / "model")
        origin.keep(kept, again)
        assert made.base == expected


def test_a_form_that_would_lose_something_is_refused(adapted, tmp_path):
    with pytest.raises(UserError) as error:
        windlass.export(adapted, tmp_path / "mine", form="model")
    assert str(error.value) == (
        f"{adapted} trained an adapter; --as adapter exports it alone, --as merged the model with "
        "it, --as own both as they are, for Windlass alone"
    )
    more = tmp_path / "more"
    shutil.copytree(adapted, more)
    recipe = yaml.safe_load((more / "recipe.yaml").read_text())
    recipe["train"]["trainable"] = ["blocks.mlp.*", "norm.*"]
    (more / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (more / "files.json").unlink()
    with pytest.raises(UserError) as error:
        windlass.export(more, tmp_path / "mine", form="adapter")
    assert str(error.value) == (
        f"{more} trained more than its adapter, blocks.mlp.gate.base.weight to begin with, which "
        "would be missing; --as merged has it all"
    )
    assert windlass.export(more, tmp_path / "mine", dry_run=True).form == "merged"
