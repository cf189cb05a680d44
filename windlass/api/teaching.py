"""Calls by which a teacher's logits, or texts that it writes, are there for a student."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from windlass.api.generation import each
from windlass.api.keywords import sections
from windlass.config import AnyRecipe, Overrides, words
from windlass.data import imported
from windlass.data.progress import progress
from windlass.errors import UserError
from windlass.evaluation import prompts
from windlass.files import parse_json, writable
from windlass.processes.clusters import Hosts
from windlass.processes.signals import Signals
from windlass.run import Run
from windlass.starting import origin
from windlass.telemetry.console import ConsoleReport
from windlass.terminal import Terminal
from windlass.training import teaching
from windlass.training.teaching import Taught

USUAL = {"tokens": 512, "temperature": 0.7, "top_p": 0.9}  # of target texts


@overload
def teach(
    recipe: AnyRecipe | None = None,
    overrides: Overrides = (),
    *,
    generate: None = None,
    **options: Any,
) -> Taught: ...


@overload
def teach(
    recipe: AnyRecipe | None = None,
    overrides: Overrides = (),
    *,
    generate: str | Path,
    **options: Any,
) -> Path: ...


def teach(
    recipe: AnyRecipe | None = None,
    overrides: Overrides = (),
    *,
    generate: str | Path | None = None,
    batch: int = 16,
    imports: str | Path | None = None,
    out: str | Path | None = None,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
    **options: Any,
) -> Taught | Path:
    """Run the teacher of a recipe over its data, and write the cache that `data.teacher` names.

    What an earlier call of the same wrote is not computed again. With `generate`, a file of JSON
    Lines, the teacher instead writes a text for every example, `batch` at a time: it continues
    texts, and answers chats and sections in place of their answers; `options` may then have the
    fields of `Sampling`.

    In place of a recipe, `imports` is a folder of .npz or safetensors files with `input_ids`,
    `topk_idx` and `topk_logits`, which are written to the folder `out` as a cache that is a data
    set by itself.
    """
    keys, sampling = sections(options)
    if recipe is not None and imports is None and out is None:
        if generate is not None:
            file = Path(generate).expanduser()
            return _generate(recipe, words(overrides, keys), file, batch, USUAL | sampling)
        how = {"hosts": hosts, "signals": signals, "report": report}
        return teaching.teach(recipe, words(overrides, keys | sampling), **how)
    if recipe is not None or imports is None or out is None or generate is not None:
        raise UserError(
            "windlass teach takes a recipe with data.teacher, or --import DIR and --out DIR"
        )
    cache = imported.write(Path(imports).expanduser(), Path(out).expanduser())
    return Taught.of(cache, len(cache.shards))


def _generate(
    recipe: AnyRecipe, overrides: Sequence[str], file: Path, batch: int, sampling: dict[str, Any]
) -> Path:
    """Write texts of the teacher, behind those that an earlier call wrote."""
    run = origin.load(recipe, overrides).read(Run, None)
    start = teaching.teacher_of(run)
    examples = list(prompts.of_data(run.data))
    keys = [f"device.kind={run.device.kind}"]
    keys += [f"model.revision={start.revision}"] if start.revision else []
    with writable(file):
        begin = _kept(file, examples, batch)
    texts = each(
        start.hub or start.path or start.run,
        [one.get("messages") or one["prompt"] for one in examples],
        keys,
        weights=start.which,
        batch=batch,
        begin=begin,
        as_text=True,
        **sampling,
    )
    with (
        progress(Terminal(stderr=True), "generating", len(examples)) as advance,
        writable(file),
        file.open("a", encoding="utf-8") as lines,
    ):
        for number, text in enumerate(texts, start=begin):
            lines.write(json.dumps(_target(examples[number], text), ensure_ascii=False) + "\n")
            lines.flush()
            advance(number + 1, "")
    return file


def _target(example: dict[str, Any], text: str) -> dict[str, Any]:
    """An example with the text of the teacher, as a student is trained on it."""
    if "messages" not in example:
        return {"text": example["prompt"] + text}
    return {"messages": [*example["messages"], {"role": "assistant", "content": text}]}


def _kept(file: Path, examples: list[dict[str, Any]], batch: int) -> int:
    """Count of the texts that are there, in whole batches; what is behind them is removed."""
    if not file.exists():
        return 0
    lines = file.read_bytes().split(b"\n")[:-1]  # behind the last newline is half a line, or none
    count = len(lines) if len(lines) == len(examples) else len(lines) // batch * batch
    for line, example in zip(lines[:count], examples, strict=False):
        if not _is_of(line, example):
            raise UserError(f"{file} has texts of other examples; name another file")
    with file.open("r+b") as opened:
        opened.truncate(sum(len(line) + 1 for line in lines[:count]))
    return count


def _is_of(line: bytes, example: dict[str, Any]) -> bool:
    try:
        row = parse_json(line)
    except ValueError:
        return False
    if not isinstance(row, dict):
        return False
    if "messages" in example:
        return isinstance(row.get("messages"), list) and row["messages"][:-1] == example["messages"]
    return str(row.get("text", "")).startswith(example["prompt"])
