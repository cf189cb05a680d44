"""The commands that report on a run, and compare runs."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from windlass.cli import completion
from windlass.cli.options import RunName, say, trimmed
from windlass.errors import UserError
from windlass.processes.clusters import find
from windlass.terminal import Terminal

WIDEST = 100  # columns of a plot
NAME = 13  # columns of the names of facts
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def report(ctx: typer.Context, run: RunName = None, as_json: Json = False) -> None:
    """Report the loss and speed of a run, and its plan beside what was measured.

    A page with the curves and with memory by part is written to report.html in the run's folder.

    windlass report quickstart
    windlass report runs/mine-1a2b3c4d --json
    """
    with ctx.obj.phase("looking at the run"):
        from windlass.api import report as call

        summary = call(run)
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2, allow_nan=False))
        return
    console = Terminal()
    console.soft_wrap = not console.is_terminal
    for line in _shown(summary, min(console.width, WIDEST)):
        console.print(line)
    from windlass.run_folder.folder import REPORT

    console.print(
        Text.assemble(("\npage".ljust(NAME + 1), "bold"), str(summary.standing.folder / REPORT))
    )


def compare(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN RUN [RUN ...]", help="two runs or more", autocompletion=completion.runs
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="first train each RUN that is a recipe, to its end"),
    ] = False,
    as_json: Json = False,
) -> int | None:
    """Compare runs: size, speed, memory, cost, losses, samples, and settings that differ.

    With --train a RUN may be a recipe too, which is trained to its end first, one after the other;
    the same command again resumes what was interrupted. Keys are then those of every recipe.

    windlass compare runs/mine-1a2b3c4d runs/mine-5e6f7a8b
    windlass compare mine-1a2b3c4d mine-5e6f7a8b other --json
    windlass compare --train quickstart mine.yaml train.steps=300
    """
    runs: Sequence[str | Path] = names or ()
    if not train and ctx.args:
        raise UserError(f"{ctx.args[0]} is a key of a recipe; --train trains recipes with it")
    if train and names and len(names) > 1:
        trained = _trained(names, ctx, Terminal(stderr=True) if as_json else None)
        if isinstance(trained, int):
            return trained
        runs = trained
    with ctx.obj.phase("looking at the runs"):
        from windlass.api import compare as call

        comparison = call(*runs)
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2, allow_nan=False))
        return None
    from windlass.reports.columns import rows

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for one in comparison.runs:
        table.add_column(Text(one.name), justify="right", overflow="fold")
    for title, group in rows(comparison):
        table.add_row(Text(title, "bold"))
        for name, values in group:
            table.add_row(Text(f"  {name}"), *map(Text, values))
    with trimmed() as console:
        console.print(table)
    for one in comparison.runs:
        if one.sample is not None:
            say(Text(f"\nsample of {one.name}, at step {one.sample.step}", "bold"))
            say(Text(indent(one.sample.text, "  ")))
    return None


def _trained(
    names: Sequence[str], ctx: typer.Context, console: Terminal | None
) -> list[Path] | int:
    """The runs of recipes, each trained to its end; or the exit code after a signal.

    A run's folder is taken as it is.
    """
    if (hosts := find(None, os.environ)) is not None:
        raise UserError(
            f"--train trains on one host, and this is {hosts}; windlass train on every host trains "
            "each recipe, and windlass compare RUN RUN compares them"
        )
    from windlass.api import train
    from windlass.run_folder.runs import of_folder
    from windlass.starting.describe import describe
    from windlass.telemetry.console import ConsoleReport

    places = {name: of_folder(name) for name in names}
    with ctx.obj.phase("reading the recipes"):
        for name, place in places.items():
            if place is None:  # refused, if at all, before the first is trained
                describe(name, ctx.args)
    for name, place in places.items():
        if place is None:
            with ConsoleReport(console) as report:
                trained = train(name, ctx.args, signals=ctx.obj, report=report)
            if trained.stopped_by is not None:
                return 128 + trained.stopped_by
            places[name] = trained.folder
    return [place for place in places.values() if place is not None]


def _shown(run: Any, width: int) -> Iterator[Text | Table]:
    from windlass.cli.plot import plot
    from windlass.reports.columns import facts, predictions
    from windlass.units import count

    for name, value in facts(run):
        yield Text.assemble((f"{name:<{NAME}}", "bold"), value)
    curves = run.curves
    drawn = [(curves["loss"], "cyan"), (curves["validation_loss"], "yellow")]
    if lines := plot(drawn, width=width - 12):
        both = [("\nloss", "bold cyan")] + [("  validation", "bold yellow")] * bool(drawn[1][0])
        yield Text.assemble(*both)
        yield from lines
    speeds = [(curves["tokens_per_second"][1:], "green")]
    if lines := plot(speeds, width=width - 12, height=4, label=count, base=0.0):
        yield Text("\ntokens/s", "bold green")
        yield from lines
    if lines := predictions(run):
        yield Text("")
        yield _table(lines)
    for note in run.planned.get("notes", ()):
        yield Text(note, "dim")
    yield from _parts(run, width)


def _table(lines: Sequence[tuple[str, str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("plan")
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _parts(run: Any, width: int) -> Iterator[Text]:
    """Planned memory by part, as bars."""
    from windlass.units import size

    parts = (run.planned.get("memory") or {}).get("parts_bytes") or {}
    whole = max(parts.values(), default=0)
    if whole:
        yield Text("\nmemory, as planned", "bold")
    for name, count in parts.items():
        bar = "█" * max(1, round((width - 30) * count / whole))
        yield Text.assemble(f"  {name:<{NAME}}{size(count):>10}  ", (bar, "magenta"))
