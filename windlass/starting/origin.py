"""Initial weights of a run: resolved in its recipe, and loaded at step 0."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from windlass import config
from windlass.config import AnyRecipe, Layers
from windlass.config.reading import attempt, report
from windlass.config.start import Start
from windlass.errors import UserError
from windlass.hub import fetch
from windlass.processes import shared_folders
from windlass.program.built import InitialArrays
from windlass.run import Run
from windlass.starting import adapter, fitting, frozen_models, hugging_face, other_run
from windlass.terminal import Terminal

ORIGINS = ("hub", "path", "run")
KEYS = (
    *ORIGINS,
    "revision",
    "weights",
    "base",
)  # those of `model` that stand for something elsewhere


def load(recipe: AnyRecipe, overrides: Sequence[str] = ()) -> Layers:
    """A recipe in its layers, with what `model: {hub | path | run: ...}` stands for written out.

    That is the model there, under the fields that are changed; a section `start`; its tokenizer,
    where the recipe names none; its adapter, or that of `adapter.path`; and a section `helpers`
    for the models that the objective names.
    """
    layers = adapter.written_out(_with_model(config.load(recipe, overrides)))
    return frozen_models.written_out(layers)


def _with_model(layers: Layers) -> Layers:
    written = layers.merged(None)
    model = written.get("model")
    if not isinstance(model, dict) or not any(key in model for key in ORIGINS):
        return layers
    override = layers.command_line.get("model")
    if isinstance(override, dict) and any(key in override for key in ORIGINS):
        model = {key: x for key, x in model.items() if key not in KEYS} | override
    start, wrong = attempt(Start, {key: model[key] for key in KEYS if key in model})
    problems = [(f"model.{key}".rstrip("."), what) for key, what in wrong]
    if written.get("start") is not None:
        which = next(key for key in ORIGINS if key in model)
        what = f"is what model.{which} is written out as; leave one of them out"
        problems.append(("start", what))
    if problems:
        raise UserError(report(problems, layers.origin))
    if start.run is not None:
        base = other_run.resolve(start, layers)
    else:
        fields = [key for key in model if key not in KEYS]
        has_tokenizer = written.get("tokenizer") is not None
        base = hugging_face.resolve(start, layers, fields, has_tokenizer=has_tokenizer)
    if written.get("tokenizer") is not None:
        base.pop("tokenizer", None)
    return layers.upon(base, instead_of={"model": KEYS})


class Taken(NamedTuple):
    """The arrays that a run starts from, and facts of them for people to read."""

    arrays: InitialArrays
    facts: list[tuple[str, str]]


def check(start: Start) -> None:
    """Check that the weights are there, before anything that takes long."""
    if start.run is not None:
        other_run.check(start)
    elif start.hub is not None:
        shared_folders.once(
            "downloading the weights", fetch.place(), lambda: hugging_face.check(start)
        )
    else:
        hugging_face.check(start)


def take(
    built: Any, vocabulary: str, say: Callable[[str], None], console: Console | None = None
) -> Taken:
    """Initial weights of a built model; `vocabulary` is what a checkpoint says of its tokenizer.

    Adapters are fitted to them, where they are of a kind that is.
    """
    start, (own, facts) = built.run.start, adapter.take(built, say)
    arrays, others = {}, {}
    if start is not None and start.run is not None:
        arrays, others, more = other_run.take(start, built, vocabulary, say)
        facts = more + facts
    elif start is not None:
        arrays, more = hugging_face.take_for(start, built)
        facts = more + facts
    stages = {number: arrays.get(number, {}) | own.get(number, {}) for number in arrays | own}
    whole, fits = fitting.fitted(built, stages, others, console or Terminal(quiet=True))
    return Taken(whole, facts + fits)


def keep(run: Run, folder: Path) -> None:
    """Keep in the folder of a run the small files of what it started from."""
    if run.start is None:
        return
    if run.start.run is not None:
        other_run.keep(run.start, folder, run.adapter)
    else:
        hugging_face.keep(run.start, folder)
