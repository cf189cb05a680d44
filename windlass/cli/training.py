"""The command that trains: a recipe, or a model on data."""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.syntax import Syntax
from rich.text import Text

from windlass.cli.options import (
    Coordinator,
    OptionalRecipe,
    Processes,
    ProcessIndex,
    options,
    saved,
    say,
)
from windlass.config import AnyRecipe, Written, shipped
from windlass.errors import UserError
from windlass.processes.clusters import ClusterFlags, find
from windlass.processes.garbage import uncollected
from windlass.processes.parent import stand_by
from windlass.terminal import Terminal

DEBUG = "--debug-compile"


def set_log_level(words: list[str]) -> None:
    """Set the log level of JAX's runtime, which JAX reads once: when it is imported."""
    if DEBUG in words:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"


def train(
    ctx: typer.Context,
    recipe: OptionalRecipe = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="fine-tune this model: a folder, a run, or OWNER/NAME"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="with --model: a file, a folder, or OWNER/NAME on the hub"
        ),
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="with --model: write the recipe to this file")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="with --model: print the recipe without training")
    ] = False,
    debug_compile: Annotated[
        bool,
        typer.Option(
            DEBUG,
            help="log compilations, write programs to the run folder, time the first steps",
        ),
    ] = False,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: ProcessIndex = None,
) -> int | None:
    """Train a recipe, or fine-tune a model on data; the same command again resumes the run.

    Without a recipe, lists the shipped ones. Ctrl-C finishes the step and saves a checkpoint,
    and so do SIGTERM and SIGHUP: the exit code is then 130, 143 or 129. A second Ctrl-C stops at
    once.

    With --model and --data no recipe is needed: chat data (messages, ShareGPT, prompt and
    completion, or Alpaca columns) in JSON Lines, Parquet or CSV is detected, and the model is
    fine-tuned with LoRA on the assistant's tokens. The recipe is printed with the choices made and
    why; any key can be overridden.

    windlass train
    windlass train quickstart
    windlass train quickstart train.steps=500 optim.learning_rate=1e-3
    windlass train mine.yaml --device gpu --mesh.tensor 2
    windlass train mine.yaml --debug-compile
    windlass train --model Qwen/Qwen2.5-0.5B-Instruct --data chats.jsonl
    windlass train --model ./model --data chats.jsonl train.epochs=1 --dry-run
    """
    if model is None and data is None:
        if save is not None or dry_run:
            option = "--dry-run" if save is None else "--save"
            raise UserError(f"{option} needs --model and --data")
        if recipe is None:
            return _list_recipes()
    elif recipe is not None:
        raise UserError(
            f"{recipe} is a recipe, which names its own model and data, and --model or --data "
            "is given too; leave one of them out"
        )
    flags = options(ClusterFlags, coordinator=coordinator, processes=processes, process=process)
    hosts, signals = find(flags, os.environ), ctx.obj
    if hosts is not None and signals.line is None:
        return stand_by(sys.argv[1:], hosts, signals, _newest_step)
    if hosts is not None and hosts.process:
        signals.who = f"{hosts}: "
    with uncollected():
        from windlass.api import train as call
        from windlass.processes.peers import together
    gc.freeze()  # what was imported stays, and need not be looked at again

    with together(hosts, signals, _newest_step):
        source: AnyRecipe | None = recipe
        if source is None:
            with signals.phase("choosing a recipe"):
                source = _tuning_recipe(model, data, ctx.args)
            if hosts is None or hosts.process == 0:
                _show(source, save)
            if dry_run:
                return None
        how = {"hosts": hosts, "signals": signals, "debug_compile": debug_compile}
        trained = call(source, ctx.args, **how, began=signals.began)
    return None if trained.stopped_by is None else 128 + trained.stopped_by


def _newest_step(run: Path) -> int | None:
    from windlass.checkpoint.store import newest_step

    return newest_step(run)


def _tuning_recipe(model: str | None, data: str | None, keys: list[str]) -> Written:
    """Fine-tuning recipe for a model and data."""
    if data is None:
        raise UserError(
            f"--model is {model}; it needs --data: a file such as chats.jsonl, a folder, or "
            "OWNER/NAME on the hub"
        )
    if model is None:
        raise UserError(
            f"--data is {data}; it needs --model: a folder, a run, or OWNER/NAME on the hub"
        )
    from windlass.api import recipe as choose

    return choose(model, data, keys)


def _show(recipe: Written, save: str | None) -> None:
    """Print a recipe, and write it to a file if one is given."""
    console = Terminal(soft_wrap=True)
    if console.is_terminal:
        console.print(Syntax(recipe.text, "yaml", background_color="default"))
    else:
        print(recipe.text)
    if save is None:
        say(Text("--save FILE writes this recipe, and windlass train FILE trains it", "dim"))
    else:
        say(Text(f"saved to {saved(recipe.text, save)}", "dim"))


def _list_recipes() -> None:
    say(Text("windlass train RECIPE, where RECIPE is a YAML file or one of"))
    names = shipped()
    width = max(len(name) for name in names)
    for name, path in names.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        say(Text.assemble((f"  {name:<{width}}", "bold"), f"  {first}"))
