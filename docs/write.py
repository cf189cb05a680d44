"""`make docs`: the schema, references of all keys, metrics and commands, and a page of claims."""

import dataclasses
import html
import inspect
import io
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from docs import claims
from windlass.api import schema
from windlass.cli.commands import app
from windlass.cli.words import explanation
from windlass.config import KINDS, comments, listing
from windlass.config.elsewhere import also
from windlass.config.reading import describe
from windlass.config.sections import Open, default, dotted, fields, holds, written
from windlass.run import Run
from windlass.telemetry.metrics import MEANINGS

WIDTH = 80  # of the commands' help
SECTIONS = {
    "which model is trained, and from which weights": ("model", "start"),
    "what is added to it": ("residual", "adapter"),
    "on which data": ("tokenizer", "data"),
    "what is minimised, and with whose help": ("objective", "helpers"),
    "how, and for how long": ("optim", "train"),
    "where, and in which precision": ("device", "mesh", "precision"),
    "what is kept and reported": ("checkpoint", "telemetry", "run"),
}
ABOUT = f"""\
# Reference

Every key of a recipe, written from the source by `make docs`; [commands](commands.md) and
[metrics](metrics.md) have pages of their own.

A recipe is a YAML file of the sections below. A key can be written dotted in any mapping
(`train.batch: 64`), and overridden on the command line: `train.batch=64` or `--train.batch 64`.
Keys under `by_device`, by kind ({listing(KINDS)}), override the rest of the file on that kind of
device. [`recipe.schema.json`](recipe.schema.json) is the same for an editor. Where a section is one
of several kinds, keys that several of them have stand once, above those of each.
"""
METRICS = """\
# Metrics

A run's `metrics.jsonl` has a JSON object per line, one every `telemetry.every` and one for each
evaluation. Besides what is listed, an objective adds the parts of its loss (`cross_entropy`) and
other metrics (`accuracy`, a share); metrics on held-out data begin with `validation_`. A number
that is not finite is written as the text "NaN", "Infinity" or "-Infinity". `tensorboard --logdir
runs` plots the same metrics, as `train/loss`, `eval/loss` and so on, beside samples and the keys of
the recipe, and `telemetry.trackers` sends them to Weights & Biases and Trackio
([tracking](tracking.md)).
`about.json` beside it records each start of the run: versions, commits, devices, keys.

With `telemetry.every: 1` the folder of a run grows by 0.8 MB in 1,000 steps, 0.45 of it in
`metrics.jsonl` and the rest for TensorBoard; by default by a tenth of that. Checkpoints
come on top, as many as `checkpoint.keep` says. `python proofs/run.py load` measures it, and
`windlass runs RUN` prints the size of a run."""


COMMANDS = """\
Written from the source by `make docs`: what `windlass COMMAND --help` prints. The exit code is 0
where all is well, 2 for a mistake on the command line or in a recipe, 1 for anything else that
failed, and 128 + N after signal N.
"""


def main() -> None:
    for name, text in pages().items():
        path = Path("docs") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


def pages() -> dict[str, str]:
    """The files of `docs/` that are written from the source, by name."""
    lines = [ABOUT, *_contents()]
    for name, (_, annotation) in fields(Run).items():
        lines += _section(name, annotation, "##")
    return {
        "claims.md": claims.page(),
        "commands.md": "\n".join(_commands()),
        "metrics.md": "\n".join(_metrics()),
        "recipe.schema.json": json.dumps(schema(), indent=2) + "\n",
        "reference.md": "\n".join(lines),
    }


def _contents() -> Iterator[str]:
    """Sections of a recipe by what they decide."""
    yield "| a recipe says | in |\n|---|---|"
    for purpose, names in SECTIONS.items():
        yield f"| {purpose} | {', '.join(f'[{name}](#{name})' for name in names)} |"
    yield ""


def _section(key: str, annotation: Any, level: str) -> Iterator[str]:
    slot = holds(annotation)
    yield f"{level} {key}\n"
    if slot.shape in ("open", "several"):
        if slot.shape == "several":
            yield f"Also a list of such sections, applied in order: `{key}: [{{...}}, {{...}}]`.\n"
        yield from _open(key, slot.of if slot.shape == "open" else holds(slot.of).of, level)
        return
    yield f"{inspect.getdoc(slot.of)}\n"
    if shorthand := getattr(slot.of, "shorthand", None):
        yield f"`{key}: x` is short for `{key}: {{{shorthand}: x}}`.\n"
    if not getattr(slot.of, "is_resolved", False):
        yield from _table(key, slot.of)
        yield from _opens(key, slot.of, level)


def _open(key: str, choice: Open, level: str) -> Iterator[str]:
    tag = dotted(key, choice.tag)
    usual = f"default {choice.usual}" if choice.usual else ""
    more = "".join(f"; {part}" for part in (usual, also(tag)) if part)
    yield f"`{tag}` is {listing(choice.names())}{more}.\n"
    if choice.instead is not None:
        yield f"In its place, with any fields to change: {inspect.getdoc(choice.instead)}\n"
        yield from _table(key, choice.instead)
    members = {name: choice.load(name) for name in choice.names()}
    rows = {name: dict(_rows(key, member)) for name, member in members.items()}
    shared = _shared(rows)
    if shared:
        yield f"{level}# {key}, shared keys\n"
        yield f"| key | holds | default | meaning | {choice.tag} |\n|---|---|---|---|---|"
        for (full, row), owners in shared.items():
            yield f"| `{full}` {row} {_owners(owners, members)} |"
        yield ""
    for name, member in members.items():
        yield f"{level}# {key}, {choice.tag} {name}\n"
        yield f"{inspect.getdoc(member)}\n"
        common = [full for full, row in rows[name].items() if (full, row) in shared]
        if common:
            yield f"Shared keys: {', '.join(f'`{full}`' for full in common)}.\n"
        yield from _rows_table(dict(rows[name].items() - shared.keys()), rows[name])
        yield from _opens(key, member, f"{level}#")


def _shared(rows: dict[str, dict[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Rows that several members of a set have word by word, each with those that have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for name, own in rows.items():
        for row in own.items():
            owners.setdefault(row, []).append(name)
    shared = {row: names for row, names in owners.items() if len(names) > 1}
    return dict(sorted(shared.items(), key=lambda one: -len(one[1])))


def _owners(owners: Collection[str], members: Collection[str]) -> str:
    if len(owners) == len(members):
        return "all"
    others = [name for name in members if name not in owners]
    return f"all but {', '.join(others)}" if len(others) < 3 else ", ".join(owners)


def _opens(key: str, schema: Any, level: str) -> Iterator[str]:
    """The open sets among the fields of a section, each with its own members."""
    for name, (_, annotation) in fields(schema).items():
        if holds(annotation).shape == "open":
            yield from _section(dotted(key, name), annotation, f"{level}#")


def _table(key: str, schema: Any) -> Iterator[str]:
    rows = dict(_rows(key, schema))
    yield from _rows_table(rows, rows)


def _rows_table(rows: Collection[str], texts: dict[str, str]) -> Iterator[str]:
    """Table of some of a section's rows, in its order."""
    if rows:
        yield "| key | holds | default | meaning |\n|---|---|---|---|"
        yield from (f"| `{full}` {text}" for full, text in texts.items() if full in rows)
        yield ""


def _rows(key: str, schema: Any) -> Iterator[tuple[str, str]]:
    """Keys of a section, each with the rest of its row."""
    notes = comments(schema)
    for name, (field, annotation) in fields(schema).items():
        full, slot, usual = dotted(key, name), holds(annotation), default(field)
        if slot.shape == "section" and not slot.optional:
            yield from _rows(full, slot.of)
            continue
        holding = f"see [{full}](#{full.replace('.', '')})"
        if slot.shape != "open" or ".N." in full:  # those of items have no part of their own
            holding = describe(annotation)
        shown = "required"
        if usual is not dataclasses.MISSING:
            shown = f"`{json.dumps(written(annotation, usual), ensure_ascii=False)}`"
        meaning = "; ".join(part for part in (notes.get(name, ""), also(full)) if part)
        meaning = html.escape(meaning, quote=False)
        yield full, f"| {holding} | {shown} | {meaning} |"
        if slot.shape == "section":
            yield from _rows(full, slot.of)
        if slot.shape in ("list", "tuple") and holds(slot.of).shape == "section":
            yield from _rows(dotted(full, "N"), slot.of)  # of the item of that number


def _metrics() -> Iterator[str]:
    yield f"{METRICS}\n\n| name | meaning |\n|---|---|"
    yield from (
        f"| `{name}` | {html.escape(text, quote=False)} |" for name, text in MEANINGS.items()
    )
    yield ""


def _commands() -> Iterator[str]:
    yield f"# Commands\n\n{COMMANDS}"
    program: Any = typer.main.get_command(app)
    whole = program.make_context("windlass", [], resilient_parsing=True)
    for name, command in program.commands.items():
        ctx = command.make_context(name, [], parent=whole, resilient_parsing=True)
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, color_system=None)
        yield f"## {name}\n\n```\n{explanation(ctx, console, WIDTH)}\n```\n"


if __name__ == "__main__":
    main()
