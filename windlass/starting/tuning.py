"""A fine-tuning recipe for a model and data, with what is left open chosen from the two."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from windlass import config
from windlass.config import Written, credentials, listing
from windlass.config.sections import flat
from windlass.config.start import Start
from windlass.config.text import write
from windlass.data import FORMATS, SOURCES, Data, tokenized, vocabulary_with_template
from windlass.devices import selection
from windlass.devices.selection import Device
from windlass.errors import UserError
from windlass.formats import chat
from windlass.hub import config as configs
from windlass.hub.fetch import CONFIGS, fetch
from windlass.run import Run
from windlass.run_folder import runs
from windlass.run_folder.folder import MODEL
from windlass.sources.jsonl import COMPRESSED
from windlass.starting import origin
from windlass.terminal import Terminal

BASE = "chat-lora"
WHOLE_MODEL_RATE = 1e-5  # the learning rate where all weights are trained
ENOUGH = 100  # examples, of which some can be held out
STEPS = 30  # an epoch has at least, while a batch can be made smaller
LARGEST_BATCH = 16
LONGEST = 4096  # tokens in a sequence
MULTIPLE = 128  # of which a length is one: matrices are multiplied in pieces that wide
FILES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
FILES |= {f"{name}{end}": "jsonl" for name in (".jsonl", ".json") for end in COMPRESSED}
FILES |= {".csv": "csv", ".txt": "text"}
A_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of the hub


class Tuned(NamedTuple):
    """A value for a key of the recipe, and why."""

    key: str
    value: Any
    why: str


def chosen(
    model: str, data: str, overrides: Sequence[str] = (), *, console: Console | None = None
) -> Written:
    """The recipe for a model, a folder or OWNER/NAME, and data, a file, a folder or OWNER/NAME.

    Keys of the command line are in it as they stand there.
    """
    credentials.refuse({"--model": model, "--data": data}, "the command line")
    recipe = config.load(BASE).merged(None)
    command_line = config.load({}, overrides).command_line
    name = f"{_stem(model)}-{_stem(data)}"
    recipe["model"] = _model(model)
    recipe["data"]["source"] = source = _source(data)
    choices = [_format(source, command_line)]
    _set(recipe, choices)
    _leave_out(recipe, flat(command_line))
    try:
        layers = origin.load(Written(name, write(recipe)), overrides)
    except UserError as refused:
        if "hub" not in recipe["model"]:
            raise
        raise UserError(f"there is no folder {model} here, and {refused}") from None
    run = layers.read(Run, None)
    thinking, examples = _thinking(run, flat(command_line))
    choices += thinking
    corpus = tokenized(examples, run.tokenizer, console=console)[0]
    lengths = np.diff(corpus.offsets)
    device = layers.peek("device", Device) or Device()
    devices = selection.devices(selection.choose_here(device))
    measured = _Measured(corpus.rows, lengths[lengths > 0], len(devices), run)
    choices += _numbers(measured, flat(command_line))
    _set(recipe, choices)
    _leave_out(recipe, flat(command_line))
    recipe = _spelled_out(config.load(Written(name, write(recipe)), overrides).merged(None))
    choices = [choice for choice in choices if choice.key not in flat(command_line)]
    command = shlex.join(["windlass", "train", "--model", model, "--data", data, *overrides])
    return Written(name, f"# Chosen by\n#\n#   {command}\n\n{_explained(recipe, choices)}")


class _Measured(NamedTuple):
    """Measurements that a recipe is chosen by."""

    examples: int
    lengths: np.ndarray  # of each document, in tokens
    devices: int
    run: Run


def _model(name: str) -> dict[str, Any]:
    folder = Path(name).expanduser()
    if runs.is_run(folder):
        return {"run": name}
    if folder.is_dir():
        return {"path": name}
    if A_NAME.fullmatch(name) and name[0] not in ".~":
        return {"hub": name}
    raise UserError(
        f"--model is {name}: there is no such folder, and a model of the hub is named OWNER/NAME"
    )


def _source(name: str) -> dict[str, Any]:
    place = Path(name).expanduser()
    if place.is_file():
        if _ending(place) not in FILES:
            raise UserError(
                f"--data is {name}; files that end in {listing(FILES)} are read, and folders of "
                "them"
            )
        return {"kind": FILES[_ending(place)], "path": name}
    if place.is_dir():
        return _in_folder(name, {_ending(file) for file in place.iterdir()} & FILES.keys())
    if A_NAME.fullmatch(name) and name[0] not in ".~" and _ending(place) not in FILES:
        return _hub(name)
    raise UserError(
        f"--data is {name}: there is no such file or folder, and a data set of the hub is named "
        "OWNER/NAME"
    )


def _ending(file: Path) -> str:
    """The ending of a name, both where the last is of a compressed file."""
    return "".join(file.suffixes[-2:]) if file.suffix in COMPRESSED else file.suffix


def _in_folder(name: str, endings: set[str]) -> dict[str, Any]:
    """The files of one kind, or a data set of several."""
    kinds = {FILES[ending] for ending in endings}
    if len(kinds) != 1:
        return _hub(name)
    (kind,) = kinds
    suffix = SOURCES.load(kind).suffix
    meant = {*([suffix] if isinstance(suffix, str) else suffix)}
    if endings & meant and endings - meant:
        each = [f"'{name}/*{ending}'" for ending in sorted(endings)]
        raise UserError(
            f"--data is {name}, whose files end in {listing(sorted(endings), 'and')}; name those "
            f"that are meant: {listing(each)}"
        )
    if endings & meant:
        return {"kind": kind, "path": name}
    return {"kind": kind, "path": f"{name}/*{min(endings)}"} if len(endings) == 1 else _hub(name)


def _hub(name: str) -> dict[str, Any]:
    return {"kind": "hub", "name": name}


def _format(source: dict[str, Any], overrides: dict[str, Any]) -> Tuned:
    """The data format of the command line; else chat where the first example is one, or text."""
    keys = {key: x for key, x in source.items() if key != "kind"}
    documents = SOURCES.load(source["kind"])(**keys)
    key = "data.format"
    if not getattr(documents, "has_rows", False):
        return Tuned(key, "text", "all tokens are trained on: these are no chats")
    if not len(documents):
        raise UserError(f"--data is {keys.get('path') or keys['name']}, which has no examples")
    requested = overrides["data"].get("format") if isinstance(overrides.get("data"), dict) else None
    if requested is not None:
        kind = requested.get("kind", "chat") if isinstance(requested, dict) else requested
        return Tuned(key, kind, "as the command line says")
    row = documents.row(0)
    if {"chosen", "rejected"} <= set(row):
        raise UserError(
            f"{documents.where(0)} has a chosen answer and a rejected one: the recipe chat-dpo "
            "trains on such pairs"
        )
    try:
        _, note = FORMATS.load("chat")().settled(row, documents.where(0))
    except UserError:
        if not isinstance(row.get("text"), str) or isinstance(overrides.get("data"), dict):
            raise
        return Tuned(key, "text", "all tokens of column text are trained on: these are no chats")
    return Tuned(key, "chat", note or "the assistant's tokens are trained on")


def _thinking(run: Run, overrides: dict[str, Any]) -> tuple[list[Tuned], Data]:
    """The thinking of a reasoning model that its default prompt asks for; the data with that."""
    key, data, format = "data.format.thinking", run.data, run.data.format
    if not isinstance(format, chat.Format) or key in overrides:
        return [], data
    template = vocabulary_with_template(data, run.tokenizer, Terminal(quiet=True)).chat
    if template is None or (suited := chat.suited_thinking(template)) is None:
        return [], data
    thinking, why = suited
    return [Tuned(key, thinking, why)], replace(data, format=replace(format, thinking=thinking))


def _numbers(measured: _Measured, overrides: dict[str, Any]) -> Iterator[Tuned]:
    count, lengths, devices, run = measured
    longest = int(lengths.max())
    limit, why = min([(LONGEST, "more is slow"), *_limit(run.start)])
    length = overrides.get("data.length") or min(limit, -(-longest // MULTIPLE) * MULTIPLE)
    fits = f"the longest of {count:,} examples has {longest:,} tokens"
    if longest > limit:
        many = int((lengths > limit).sum())
        fits = f"{many:,} of {count:,} examples are longer, up to {longest:,} tokens; {why}"
    yield Tuned("data.length", length, fits)
    share = 0.05 if count >= ENOUGH else 0.0
    few = "" if share else f": {count} {'is' if count == 1 else 'are'} too few to hold out any"
    yield Tuned("data.validation", share, f"share of examples held out{few}")
    packed = max(1, int(lengths.clip(max=length).sum() * (1 - share)) // length)
    batch = 2 ** int(np.log2(max(1, min(LARGEST_BATCH, packed // STEPS))))
    batch = -(-batch // devices) * devices
    steps = "1 step" if packed // batch == 1 else f"about {packed // batch} steps"
    yield Tuned("train.batch", batch, f"{steps} per epoch")
    if not run.adapter:
        yield Tuned("optim.learning_rate", WHOLE_MODEL_RATE, "all weights are trained")
    elif "experts" in run.model.sizes and not {"adapter.dropout", "adapter.targets"} & {*overrides}:
        yield Tuned("adapter.dropout", 0.0, "PEFT has none for experts")


def _limit(start: Start | None) -> list[tuple[int, str]]:
    """Context length of a model, where its config has one."""
    if start is None:
        return []
    folder = Path(start.path or "").expanduser()
    if start.run is not None:
        folder = Path(start.run).expanduser() / MODEL
        if not folder.is_dir():  # a model of its own, which began with random weights
            return []
    if start.hub is not None:
        folder = fetch(start.hub, start.revision, CONFIGS).folder
    context = configs.language(configs.load(folder)).get("max_position_embeddings")
    return [(context, f"the model's context is {context:,}")] if isinstance(context, int) else []


def _leave_out(recipe: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Drop the keys in whose place the command line has others."""
    for key, instead in (("steps", "epochs"), ("batch_per_device", "batch")):
        if overrides.get(f"train.{key}") is not None:
            recipe["train"].pop(instead, None)


def _set(recipe: dict[str, Any], choices: list[Tuned]) -> None:
    for key, value, _ in choices:
        *sections, name = key.split(".")
        place = recipe
        for section in sections:
            if not isinstance(place[section], dict):
                place[section] = {"kind": place[section]}
            place = place[section]
        place[name] = value


def _spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree with the name of each bare value, such as `chat` of a format, that has keys beside."""
    return {
        key or "kind": _spelled_out(value) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def _explained(recipe: dict[str, Any], choices: list[Tuned]) -> str:
    """A recipe as YAML, with the reasons for what was chosen."""
    reasons, path, lines = {key: why for key, _, why in choices}, [], []
    for line in write(recipe).splitlines():
        key = line.lstrip()
        path = [*path[: (len(line) - len(key)) // 2], key.partition(":")[0]]
        why = reasons.pop(".".join(path), None)
        lines.append(f"{line}  # {why}" if why else line)
    return "\n".join([*lines, ""])


def _stem(name: str) -> str:
    last = Path(name.rstrip("/")).name
    ending = _ending(Path(last))
    stem = last.removesuffix(ending) if ending in FILES else last
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "here"
