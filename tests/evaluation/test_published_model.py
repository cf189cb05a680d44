"""Models that are no runs, before and after training: folders, exports and those of the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import windlass
from tests import published
from windlass import api
from windlass.errors import UserError

ALONE: dict[str, Any] = {"device": {"kind": "cpu", "count": 1}}
GREEDY: dict[str, Any] = {"tokens": 6, "temperature": 0, **ALONE}
QUESTION = [{"role": "user", "content": "What comes after 3?"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, chats, a run from one on the other, and both kinds of export."""
    folder = tmp_path_factory.mktemp("published")
    published.write(folder / "model")
    published.write_chats(folder / "chats.jsonl", 120)
    recipe = {
        "model": {"path": str(folder / "model")},
        "adapter": {"kind": "lora", "rank": 2},
        "data": {
            "source": {"kind": "jsonl", "path": str(folder / "chats.jsonl")},
            "format": "chat",
            "length": 128,
            "validation": 0.1,
        },
        "optim": {"kind": "adamw", "learning_rate": 0.1, "schedule": {"shape": "constant"}},
        "train": {"steps": 3, "batch": 8},
        "checkpoint": {"keep": 9},
        "run": {"dir": str(folder / "run")},
        **ALONE,
    }
    windlass.train(recipe)
    for form in ("adapter", "merged"):
        windlass.export(folder / "run", folder / form, form=form)
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch) -> None:
    monkeypatch.chdir(place)


def refusal(call, *words, **options) -> str:
    with pytest.raises(UserError) as refused:
        call(*words, **options)
    return str(refused.value)


def measured(*words, **options) -> dict[str, float]:
    found = windlass.evaluate(*words, **options)
    return {name: value for name, value in found.items() if name != "over"}


@pytest.mark.long
def test_before_and_after_are_measured_on_the_data_of_the_run():
    before = measured("model", data="run", **ALONE)
    assert before == pytest.approx(measured("run", step=0), rel=1e-5)
    after = measured("run")
    assert after["loss"] < before["loss"] - 0.1
    for export in ("adapter", "merged"):
        found = measured(export, data="run", **ALONE)
        assert found["loss"] == pytest.approx(after["loss"], rel=1e-5)
        assert found["step"] == 0


@pytest.mark.long
def test_models_beside_a_run_are_measured_on_its_rows_by_its_objective(tmp_path):
    found = windlass.evaluate("run", beside=["merged", "model"])
    others = found["beside"]
    assert list(others) == ["merged", "model"]
    assert others["merged"]["loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert others["model"]["loss"] > found["loss"] + 0.1
    assert others["model"].keys() == found.keys() - {"beside", "over"}
    other = shutil.copytree("model", tmp_path / "other") / "tokenizer.json"
    tokenizer = json.loads(other.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other.write_text(json.dumps(tokenizer))
    said = refusal(windlass.evaluate, "run", beside=str(tmp_path / "other"))
    assert "what is measured side by side has one vocabulary" in said


def test_a_model_is_measured_on_what_training_would_hold_out_of_a_file():
    found = measured("model", data="chats.jsonl", **ALONE)
    rows = windlass.data(windlass.recipe("model", "chats.jsonl", **ALONE)).split("validation")
    same = {"source": {"kind": "jsonl", "path": "chats.jsonl"}, "format": "chat"}
    again = measured("model", data=same | {"length": 128, "validation": 0.05}, **ALONE)
    assert len(rows) and found == pytest.approx(again, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("model", 0),
        pytest.param("adapter", 3, marks=pytest.mark.long),
        pytest.param("merged", 3, marks=pytest.mark.long),
    ],
)
def test_a_model_generates_what_the_run_does_where_it_has_the_same_weights(name, step):
    prompts = ["Once", QUESTION]
    texts = windlass.generate(name, prompts, **GREEDY)
    assert texts == windlass.generate("run", prompts, step=step, **GREEDY)
    talk = windlass.chat(name, **GREEDY)
    assert talk("What comes after 3?") == texts[1]
    assert talk.longest == published.LENGTH


def test_what_only_a_run_has_is_refused_of_a_model():
    assert refusal(windlass.generate, "model", "Once", step=2) == (
        "model is a model, which has no step 2: those are of a run"
    )
    assert refusal(windlass.evaluate, "model", data="run", weights="best") == (
        "model is a model, which has no best weights: those are of a run"
    )
    assert refusal(windlass.evaluate, "model") == (
        "model is a model, which has no held-out data of its own; --data names it: a run or a "
        "recipe whose data it is, a file, a folder, or OWNER/NAME on the hub"
    )
    assert refusal(windlass.evaluate, "run", data="chats.jsonl") == (
        "run is a run, which is measured on its own data, and --data is chats.jsonl; "
        "data.source.path=FILE overrides its own"
    )
    assert refusal(windlass.evaluate, "model", data="chat-dpo") == (
        "--data is chat-dpo, which trains by preference, and a model has no loss of that kind; "
        "`windlass evaluate chat-dpo --step 0` measures where the run began"
    )


def test_a_name_of_the_hub_is_looked_up_there_and_a_misspelt_path_is_not():
    assert refusal(windlass.generate, "someone/tiny", "Once").startswith(
        "someone/tiny is no run or folder here, and model.hub is someone/tiny; the hub is not "
        "contacted, since HF_HUB_OFFLINE is set"
    )
    assert refusal(windlass.generate, "model/tiny", "Once").startswith("model/tiny is not a run: ")


def test_an_adapter_whose_model_is_not_here_is_refused(tmp_path):
    folder = Path(shutil.copytree("adapter", tmp_path / "alone"))
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(Path("model").resolve()), "/gone"))
    assert refusal(windlass.chat, str(folder)) == (
        f"{folder} is an adapter, and the model that it was made for is /gone; "
        "`windlass export RUN --as merged` writes a whole model"
    )


def test_what_is_evaluated_is_said():
    assert api.subject("run") == ("run", "run")
    assert api.subject("merged") == ("model", "merged")
