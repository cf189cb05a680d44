"""Calls that train, and that make what is trained: recipes and data."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from signal import SIGINT
from typing import Any

from rich.console import Console

from windlass import config
from windlass.api import notebook
from windlass.api.run_folders import report as report_of
from windlass.config import AnyRecipe, Layers, Overrides, Written, json_schema, words
from windlass.config.reading import report as problem_report
from windlass.data import Prepared, prepare
from windlass.devices import selection
from windlass.devices.selection import Device
from windlass.errors import UserError
from windlass.files import writable, write
from windlass.processes.clusters import Hosts
from windlass.processes.signals import Signals
from windlass.program.length import Length
from windlass.run import Run
from windlass.run_folder.folder import REPORT
from windlass.starting import origin, tuning
from windlass.telemetry.console import ConsoleReport
from windlass.training.loop import Trained
from windlass.training.train import train as train_run


def train(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
    debug_compile: bool = False,
    began: float | None = None,
    **keys: Any,
) -> Trained:
    """Train a recipe to its last step, from wherever an earlier call of the same left it.

    Keys are overridden by a list, a mapping, or sections as keywords: `train={"steps": 5}`. After
    Ctrl-C this raises KeyboardInterrupt once the run is saved, and exits after another signal; with
    `signals`, which are the caller's, it returns, and `stopped_by` is the signal. What the run will
    take of its devices is planned before, and kept beside what was measured; where memory runs out,
    the error says what would fit. In a notebook losses are drawn in a plot as they come.
    `debug_compile` logs compilations, writes programs to the run's folder and times the first
    steps. On several hosts see `training.train.train`. The time of the run counts from `began`, in
    seconds since 1970, or from this call.
    """
    with notebook.live_report() if report is None else nullcontext(report) as report:
        how = {"hosts": hosts, "signals": signals, "report": report, "began": began}
        how |= {"debug_compile": debug_compile}
        trained = train_run(recipe, words(overrides, keys), **how, plans=True, page=_page)
    if signals is None and trained.stopped_by is not None:
        if trained.stopped_by != SIGINT:
            raise SystemExit(128 + trained.stopped_by)
        raise KeyboardInterrupt(f"saved {trained.folder} at step {trained.step}; train resumes it")
    return trained


def data(
    recipe: AnyRecipe,
    overrides: Overrides = (),
    *,
    console: Console | None = None,
    **keys: Any,
) -> Prepared:
    """Prepared data of a recipe, as the model will see it: tokenised, split and packed.

    No model is built, and the devices that the recipe requests need not be here.
    """
    layers = origin.load(recipe, words(overrides, keys))
    run = layers.read(Run, _kind(layers))
    prepared = prepare(run.data, run.tokenizer, console=console)
    drawn = None
    if run.train.batch:
        per_epoch = len(prepared.split("train")) // run.train.batch
        drawn = run.train.batch * Length.of(run.train, per_epoch).steps
    return dataclasses.replace(prepared, drawn=drawn)


def recipe(
    model: str | Path,
    data: str | Path,
    overrides: Overrides = (),
    *,
    console: Console | None = None,
    **keys: Any,
) -> Written:
    """Fine-tuning recipe for a model and data, for `train`: what is left open is chosen.

    The model is a folder, a run, or OWNER/NAME of the hub; the data a file, a folder or OWNER/NAME.
    """
    return tuning.chosen(str(model), str(data), words(overrides, keys), console=console)


def new(file: str | Path, base: AnyRecipe = "quickstart") -> Path:
    """Write a recipe to edit, made from another: each key with its meaning, and those left out.

    A file that is there already is left alone.
    """
    place = Path(file).expanduser()
    if place.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file} is no name of a recipe; {place.stem or 'mine'}.yaml would do")
    if place.exists():
        raise UserError(f"{file} is there already, and is left as it is; name another file")
    layers = config.load(base)
    if layers.problems:
        raise UserError(problem_report(list(layers.problems), layers.origin))
    recipe = layers.recipe | ({"by_device": layers.by_device} if layers.by_device else {})
    about = f"# Made from {layers.name}. `windlass train {place.name}` trains it.\n"
    about += "# A line `# key: value` is a key that is left out, with its default.\n\n"
    with writable(place):
        write(place, about + config.commented(recipe, Run))
    return place


def schema() -> dict[str, Any]:
    """JSON schema of a recipe."""
    return json_schema(Run)


def _page(folder: Path) -> str:
    """Report of a run in HTML, written to its folder too."""
    return report_of(folder).standing.folder.joinpath(REPORT).read_text(encoding="utf-8")


def _kind(layers: Layers) -> str | None:
    """Kind of device that decides which keys win; None where none does."""
    device = layers.peek("device", Device) or Device()
    if device.kind != "auto":
        return device.kind
    return selection.choose_here(device).kind if layers.by_device else None
