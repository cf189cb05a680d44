"""The files of an export: the name and size of each, known before it is written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from windlass.config import tree
from windlass.data.tokenizer import Tokeniser
from windlass.hub import config, shards, weights
from windlass.release.card import Subject, card
from windlass.release.source import Source

GENERATION = "generation_config.json"

Tell = Callable[[int], None]


class File(NamedTuple):
    """A file to be written into a folder; whoever waits is told of bytes as they are written."""

    name: str
    size: int
    write: Callable[[Path, Tell], None]


def text(name: str, content: str | bytes) -> File:
    raw = content.encode() if isinstance(content, str) else content

    def write(folder: Path, tell: Tell) -> None:
        (folder / name).write_bytes(raw)
        tell(len(raw))

    return File(name, len(raw), write)


def as_json(name: str, content: dict[str, Any]) -> File:
    return text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def whole(source: Source, model: Any, dtype: str, shard_size: int) -> Iterator[File]:
    """A model in sharded safetensors, with what says how it computes and how it writes."""
    yield as_json("config.json", _config(source, dtype))
    yield as_json(GENERATION, source.came_with(GENERATION) or _ends(source.tokeniser))
    parts = shards.divided(
        (tensor.typed(dtype) for tensor in weights.tensors(model, source.names)), shard_size
    )
    yield from (File(part.file, part.size, part.write) for part in parts)
    if len(parts) > 1:
        yield text(shards.INDEX, shards.index(parts))


def beside(source: Source, subject: Subject) -> Iterator[File]:
    """What every export has: the tokenizer's files, and the card."""
    tokeniser = source.tokeniser
    ends = {"eos_token": tokeniser.eos, "bos_token": tokeniser.bos}
    named = {key: tokeniser.name(token) for key, token in ends.items() if token is not None}
    yield text("tokenizer.json", tokeniser.text)
    yield as_json("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    yield text("README.md", card(subject))


def _config(source: Source, dtype: str) -> dict[str, Any]:
    model = source.run.model
    if source.names is None:  # nobody else has such models: the keys of a recipe say all
        return {"family": type(model).__module__.rpartition(".")[2], **tree(model), "dtype": dtype}
    like = source.came_with("config.json")
    found = config.written(model, length=source.run.data.length, dtype=dtype, like=like)
    return found if like else found | _ends(source.tokeniser)


def _ends(tokeniser: Tokeniser) -> dict[str, int | None]:
    return {"bos_token_id": tokeniser.bos, "eos_token_id": tokeniser.eos}
