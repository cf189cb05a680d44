"""Small models in folders as Hugging Face has them, with a tokenizer that knows chats."""

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from safetensors.numpy import save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from tests import tiny
from windlass.adapters import Peft
from windlass.data.vocabulary import byte
from windlass.hub import config as configs
from windlass.hub import peft
from windlass.hub.chat_template import CHATML
from windlass.hub.shards import INDEX, divided, index
from windlass.hub.weights import tensors

SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCAB = 257 + len(SPECIAL)
LENGTH = 512  # the positions it says it was trained on
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, family: str = "qwen2", template: str | None = CHATML) -> Path:
    """A tiny model of a family with random weights; every byte is a token."""
    folder.mkdir(parents=True)
    config = dataclasses.replace(tiny.config(family), vocab=VOCAB, scaling=None)
    model = eqx.filter_jit(config.init)(jax.random.key(0))
    names = importlib.import_module(f"windlass.models.{family}").NAMES
    save_weights(folder, model, names)
    said = configs.written(config, length=LENGTH, dtype="float32")
    write_json(folder / "config.json", said)
    write_tokenizer(folder, template)
    write_json(folder / "generation_config.json", {"eos_token_id": VOCAB - 1})
    return folder


def write_tokenizer(folder: Path, template: str | None = CHATML) -> None:
    """A tokenizer of which every byte is a token, with a chat template."""
    library = Library.from_str(byte().text)
    library.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    write_json(folder / "tokenizer_config.json", settings)


def in_cache(cache: Path, *names: str) -> Path:
    """A cache of the hub in which each of these models is a tiny one; returns the cache."""
    for name in names:
        write(snapshot(cache, name))
    return cache


def snapshot(cache: Path, name: str) -> Path:
    """The folder that a model of the hub has in a cache, which is not made yet."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def save_weights(
    folder: Path,
    model: Any,
    names: Mapping[str, str],
    *,
    dtype: str | None = None,
    shard_bytes: int = 10**9,
) -> None:
    """The safetensors files of a model, with an index where they are several."""
    values = [one.typed(dtype) if dtype else one for one in tensors(model, names)]
    shards = divided(values, shard_bytes)
    for shard in shards:
        shard.write(folder)
    if len(shards) > 1:
        (folder / INDEX).write_text(index(shards), encoding="utf-8")


def save_adapter(
    folder: Path,
    model: Any,
    adapter: Peft,
    table: Mapping[str, str],
    base: str | None,
    whole: Sequence[str] = (),
) -> None:
    """A folder that `PeftModel.from_pretrained` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {one.name: one.read() for one in peft.tensors(model, adapter, table, whole)}
    save_file(arrays, folder / peft.TENSORS, {"format": "pt"})
    write_json(folder / peft.CONFIG, peft.described(model, adapter, table, base, whole))


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def write_chats(path: Path, count: int) -> None:
    """Chats of one question and one answer that can be learned by heart."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What comes after {number}?"},
                {"role": "assistant", "content": f"{number + 1} does."},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
