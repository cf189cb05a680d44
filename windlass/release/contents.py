"""The files of an export: the name and size of each, known before it is written."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.config import tree
from windlass.data.vocabulary import Vocabulary
from windlass.evaluation.finished_run import FinishedRun
from windlass.hub import config, fetch, peft, shards
from windlass.hub.shards import ShardTensor
from windlass.release import gguf_model
from windlass.release.card import Subject, card
from windlass.release.gguf_file import GgufFile
from windlass.release.low_bit import StoredBits
from windlass.run_folder import folder as folders

GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
# The name that transformers 5 writes for any tokenizer.json, and the one that 4 knows as well.
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"

AS_IS = "as-is"  # of each array the dtype that it has

Tell = Callable[[int], None]


class ExportFile(NamedTuple):
    """File to be written into a folder; progress in bytes is reported as they are written."""

    name: str
    size: int
    write: Callable[[Path, Tell], None]
    bits: StoredBits | None = None  # of quantized linear maps


def text(name: str, content: str | bytes) -> ExportFile:
    raw = content.encode() if isinstance(content, str) else content

    def write(folder: Path, tell: Tell) -> None:
        (folder / name).write_bytes(raw)
        tell(len(raw))

    return ExportFile(name, len(raw), write)


def as_json(name: str, content: dict[str, Any]) -> ExportFile:
    return text(name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def whole(
    source: FinishedRun,
    tensors: Iterable[ShardTensor],
    dtype: str,
    shard_size: int,
    *,
    has_adapters: bool = False,
) -> Iterator[ExportFile]:
    """A model in sharded safetensors, with its config and its settings of generation.

    With adapters, whose arrays are among the tensors, all are of the dtypes that they have.
    """
    yield as_json("config.json", config_json(source, dtype, has_adapters))
    if source.vocabulary is not None:
        yield as_json(GENERATION, _generation(source, source.vocabulary))
    for name in fetch.PROCESSORS:
        if (path := source.folder / folders.MODEL / name).is_file():
            yield text(name, path.read_bytes())
    typed = tensors if dtype == AS_IS else (tensor.typed(dtype) for tensor in tensors)
    parts = shards.divided(typed, shard_size)
    yield from (ExportFile(part.file, part.size, part.write) for part in parts)
    if len(parts) > 1:
        yield text(shards.INDEX, shards.index(parts))


def adapter(
    source: FinishedRun, model: Any, base: str | None, dtype: str, whole: Sequence[str]
) -> Iterator[ExportFile]:
    """The two files of a PEFT adapter, with the weights that were trained `whole` beside it."""
    (settings,) = source.run.adapter
    about = peft.described(model, settings, source.built.names, base, whole)
    revision = source.start.get("revision")
    yield as_json(peft.CONFIG, about | ({"revision": revision} if revision else {}))
    own = peft.tensors(model, settings, source.built.names, whole)
    part = shards.Shard(peft.TENSORS, [tensor.typed(dtype) for tensor in own])
    yield ExportFile(part.file, part.size, part.write)


def gguf(source: FinishedRun, file: GgufFile, subject: Subject) -> Iterator[ExportFile]:
    """A GGUF file, which has the tokenizer inside, with what ollama reads, and the card."""
    is_model = subject.form == "gguf"
    yield ExportFile(file.name, file.size, file.write, file.bits if is_model else None)
    if is_model:
        yield text("Modelfile", gguf_model.modelfile(file.name, source.vocabulary))
    yield text("README.md", card(subject))


def beside(source: FinishedRun, subject: Subject) -> Iterator[ExportFile]:
    """Files of every export: the tokenizer with its chat template, and the card."""
    for path in sorted((source.folder / folders.TOKENIZER).glob("*")):
        if path.name == SETTINGS:
            settings = json.loads(path.read_text(encoding="utf-8"))
            is_new = settings.get("tokenizer_class") == NEW_CLASS
            yield as_json(SETTINGS, settings | ({"tokenizer_class": OLD_CLASS} if is_new else {}))
        elif path.name != GENERATION:
            yield text(path.name, path.read_bytes())
    yield text("README.md", card(subject))


def config_json(source: FinishedRun, dtype: str, has_adapters: bool = False) -> dict[str, Any]:
    """Contents of config.json."""
    if has_adapters or not source.has_hugging_face_form:
        return config.written_own(_sections(source, has_adapters), _dtype_name(dtype))
    like = source.came_with("config.json")
    run = source.run
    ours = config.written(
        run.model,
        length=run.data.length,
        dtype=dtype,
        like=like,
        scores=run.objective.scores,
    )
    if like or (vocabulary := source.vocabulary) is None:
        return ours
    return ours | {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos}


def _sections(source: FinishedRun, has_adapters: bool) -> dict[str, Any]:
    """Sections of the run's recipe that define its model."""
    recipe, sections = tree(source.run), {}
    for name in ("model", "residual", "adapter"):
        is_needed = {"residual": not source.run.residual.is_plain, "adapter": has_adapters}
        if is_needed.get(name, True):
            sections[name] = recipe[name]
    return sections


def _dtype_name(dtype: str) -> str:
    return "float32" if dtype == AS_IS else dtype


def _generation(source: FinishedRun, vocabulary: Vocabulary) -> dict[str, Any]:
    """generation_config.json as it came, with every token that ends an answer."""
    original = source.came_with(GENERATION) or {}
    eos, stops = original.get("eos_token_id"), sorted(vocabulary.stops)
    first = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ends = list(dict.fromkeys([*first, *stops]))
    own = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    return {"bos_token_id": vocabulary.bos, **original, **own}
