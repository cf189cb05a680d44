"""What is chosen for a model and data, and what is refused."""

import json
from pathlib import Path

import pytest
from datasets import config
from huggingface_hub import constants

import windlass
from tests import published
from tests.formats.templates import QWEN3, QWEN25
from windlass.config import load
from windlass.config.sections import flat
from windlass.errors import UserError

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    published.write(folder / "model")
    published.write_chats(folder / "few.jsonl", 20)
    published.write_chats(folder / "many.jsonl", 2000)
    long = [{"prompt": "Again?", "completion": "Yes. " * count} for count in (1, 50, 400)]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    (folder / "plain.jsonl").write_text('{"text": "Once upon a time"}\n' * 3)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "other.jsonl").write_text('{"body": "Once"}\n')
    (folder / "asked.jsonl").write_text('{"question": "Again?", "answer": "Yes."}\n' * 3)
    (folder / "empty.jsonl").write_text("")
    (folder / "table.csv").write_text("prompt,completion\nAgain?,Yes.\n")
    (folder / "table.tsv").write_text("a\tb\n")
    (folder / "nothing").mkdir()
    (folder / "mixed").mkdir()
    published.write_chats(folder / "mixed" / "a.jsonl", 2)
    (folder / "mixed" / "b.json.gz").write_bytes(b"")
    (folder / "folder").mkdir()
    published.write_chats(folder / "folder" / "a.ndjson", 2)
    return folder


def chosen(place: Path, monkeypatch, data: str, *keys: str, model: str = "model") -> dict:
    monkeypatch.chdir(place)
    recipe = windlass.recipe(model, data, ["device=cpu", "device.count=1", *keys])
    return flat(load(recipe).merged(None)) | {"name": recipe.name}


def test_many_rows_make_larger_batches_and_some_are_held_out(place, monkeypatch):
    few = chosen(place, monkeypatch, "few.jsonl")
    assert few["model.path"] == "model" and few["name"] == "model-few"
    assert few["adapter.kind"] == "lora" and few["data.format"] == "chat"
    assert (few["data.length"], few["data.validation"], few["train.batch"]) == (128, 0.0, 1)
    many = chosen(place, monkeypatch, "many.jsonl")
    # 2,000 rows of about 53 tokens are some 780 rows of 128: 48 steps of 16.
    assert (many["data.validation"], many["train.batch"]) == (0.05, 16)
    assert many["optim.learning_rate"] == 2e-4 and many["train.epochs"] == 3


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            QWEN3.source,
            "none  # prompts leave the thought to the model: an empty one is learned, too",
        ),
        (
            QWEN3.source.replace(
                "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"
            ).replace("<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n", ""),
            "empty  # prompts open a thought: one that is empty is learned, too",
        ),
        (QWEN25.source, None),
    ],
    ids=["left", "opened", "without"],
)
def test_a_reasoning_model_is_taught_what_its_default_prompt_asks_for(
    source: str, line: str | None, place, monkeypatch, tmp_path
):
    monkeypatch.chdir(place)
    published.write(tmp_path / "model", template=source)
    keys = ["device=cpu", "device.count=1"]
    text = windlass.recipe(str(tmp_path / "model"), "few.jsonl", keys).text
    if line is None:
        assert "  format: chat  # examples look like chats: messages\n  length" in text
        return
    format = "  format:  # examples look like chats: messages\n    kind: chat\n"
    assert f"{format}    thinking: {line}\n" in text
    keys.append("data.format.thinking=off")
    text = windlass.recipe(str(tmp_path / "model"), "few.jsonl", keys).text
    assert "    kind: chat\n    thinking: off\n" in text


def test_experts_are_adapted_without_dropout_which_peft_has_none_of_for_them(place, monkeypatch):
    published.write(place / "experts", "mixtral")
    found = chosen(place, monkeypatch, "few.jsonl", model="experts")
    assert found["adapter.dropout"] == 0.0
    targets = "adapter.targets=[q_proj, v_proj]"
    assert chosen(place, monkeypatch, "few.jsonl", targets, model="experts")["adapter.dropout"]


def test_keys_of_the_command_line_are_not_chosen_against(place, monkeypatch):
    found = chosen(place, monkeypatch, "few.jsonl", "train.steps=5", "adapter=null")
    assert "train.epochs" not in found
    assert found["optim.learning_rate"] == 1e-5
    found = chosen(place, monkeypatch, "few.jsonl", "train.batch_per_device=2", "data.length=64")
    assert "train.batch" not in found


def test_keys_of_the_command_line_are_in_the_recipe_so_that_it_can_be_kept(place, monkeypatch):
    monkeypatch.chdir(place)
    keys = ["device=cpu", "device.count=1", "train.epochs=5", "train.batch=2", "adapter.rank=4"]
    recipe = windlass.recipe("model", "few.jsonl", [*keys, "data.format.system=Be brief."])
    found = flat(load(recipe).merged(None))
    assert (found["train.epochs"], found["train.batch"], found["adapter.rank"]) == (5, 2, 4)
    assert found["data.format.system"] == "Be brief." and found["device.count"] == 1
    assert "  format:  # as the command line says\n    kind: chat\n    system: " in recipe.text
    assert "  batch: 2\n" in recipe.text  # with no word on a batch that was not chosen
    assert "'data.format.system=Be brief.'\n\nmodel:\n" in recipe.text


def test_rows_longer_than_the_model_reads_are_counted(place, monkeypatch):
    monkeypatch.chdir(place)
    text = windlass.recipe("model", "long.jsonl", ["device=cpu", "device.count=1"]).text
    assert (
        "  length: 512  # 1 of 3 examples are longer, up to 2,027 tokens; the model's context is "
        "512\n"
    ) in text


def test_rows_that_are_no_chats_are_trained_on_whole(place, monkeypatch):
    monkeypatch.chdir(place)
    text = windlass.recipe("model", "plain.jsonl", ["device=cpu", "device.count=1"]).text
    assert "  format: text  # all tokens of column text are trained on: these are no chats" in text


def test_other_files_of_chats_are_read_by_their_columns(place, monkeypatch):
    found = chosen(place, monkeypatch, "table.csv")
    assert (found["data.source.kind"], found["data.format"]) == ("csv", "chat")
    found = chosen(place, monkeypatch, "folder")
    assert (found["data.source.kind"], found["data.format"]) == ("jsonl", "chat")
    assert found["data.source.path"] == "folder/*.ndjson"


def test_columns_of_other_names_are_those_that_the_command_line_says(place, monkeypatch):
    keys = ["data.format.prompt=question", "data.format.completion=answer"]
    found = chosen(place, monkeypatch, "asked.jsonl", *keys)
    assert (found["data.format.prompt"], found["data.format.completion"]) == ("question", "answer")
    with pytest.raises(UserError) as refusal:
        chosen(place, monkeypatch, "asked.jsonl", "data.format.prompt=ask", keys[1])
    has = "its columns are question and answer"
    assert str(refusal.value) == f"asked.jsonl line 1 has no column ask; {has}"


def test_a_name_is_a_data_set_of_the_hub(place, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "library")
    cached = tmp_path / "datasets--someone--chats"
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "README.md").write_text("# Chats")
    published.write_chats(cached / "snapshots" / COMMIT / "train.jsonl", 20)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    found = chosen(place, monkeypatch, "someone/chats")
    assert (found["data.source.kind"], found["data.source.name"]) == ("hub", "someone/chats")
    assert (found["name"], found["data.format"]) == ("model-chats", "chat")
    few = chosen(place, monkeypatch, "few.jsonl")
    numbers = ("data.length", "data.validation", "train.batch")
    assert [found[key] for key in numbers] == [few[key] for key in numbers]
    with pytest.raises(UserError) as refusal:
        chosen(place, monkeypatch, "someone/chat")
    assert str(refusal.value) == (
        "data.source.name is someone/chat; the hub is not contacted, since HF_HUB_OFFLINE is set, "
        f"and it is not in {tmp_path}, which has someone/chats. Where there is a connection, `hf "
        "download someone/chat --repo-type dataset` fills that folder, which can be copied here, "
        "and with --local-dir FOLDER makes one that a recipe names by its path"
    )


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (
            "modle",
            "few.jsonl",
            "--model is modle: there is no such folder, and a model of the hub is named OWNER/NAME",
        ),
        (
            "nothing",
            "few.jsonl",
            "model.path is nothing, which has no config.json: it is no Hugging Face model",
        ),
        (
            "model",
            "fwe.jsonl",
            "--data is fwe.jsonl: there is no such file or folder, and a data set of the hub is "
            "named OWNER/NAME",
        ),
        (
            "model",
            "table.tsv",
            "--data is table.tsv; files that end in .jsonl, .ndjson, .json, .parquet, .jsonl.gz, "
            ".jsonl.zst, .json.gz, .json.zst, .csv or .txt are read, and folders of them",
        ),
        ("model", "empty.jsonl", "--data is empty.jsonl, which has no examples"),
        (
            "model",
            "mixed",
            "--data is mixed, whose files end in .json.gz and .jsonl; name those that are meant: "
            "'mixed/*.json.gz' or 'mixed/*.jsonl'",
        ),
        (
            "model",
            "pairs.jsonl",
            "pairs.jsonl line 1 has a chosen answer and a rejected one: the recipe chat-dpo "
            "trains on such pairs",
        ),
        (
            "model",
            "other.jsonl",
            "other.jsonl line 1 has the columns body, and a chat has messages, conversations, "
            "prompt and completion, or instruction and output; data.format.messages, or "
            "data.format.prompt and completion, name other columns",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(place, monkeypatch, model, data, said):
    with pytest.raises(UserError) as refusal:
        chosen(place, monkeypatch, data, model=model)
    assert str(refusal.value) == said


def test_a_name_that_is_neither_a_folder_nor_on_the_hub_says_both(place, monkeypatch):
    with pytest.raises(UserError) as refusal:
        chosen(place, monkeypatch, "few.jsonl", model="modles/qwen")
    assert str(refusal.value).startswith(
        "there is no folder modles/qwen here, and model.hub is modles/qwen; the hub is not "
        "contacted"
    )
