"""The commands that report on a run, and compare runs."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from windlass.cli import completion
from windlass.cli.options import RunName, options, say, trimmed
from windlass.config import section
from windlass.errors import UserError
from windlass.files import writable, write
from windlass.processes.clusters import find
from windlass.terminal import Terminal

WIDEST = 100  # columns of a plot
NAME, WIDE = 13, 17  # columns of the names of facts, and of parts
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Watch = Annotated[
    bool, typer.Option("--watch", help="serve the page on this machine, live, until Ctrl-C")
]
Port = Annotated[
    str | None, typer.Option(metavar="N", help="with --watch: the port; default: a free one")
]
Csv = Annotated[
    str | None, typer.Option(metavar="FILE", help="write the metrics as CSV; - prints them")
]


@section
class Served:
    """The options of a live page."""

    port: int  # 0 is a free one

    def __post_init__(self):
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be from 1 to 65535")


def report(
    ctx: typer.Context,
    run: RunName = None,
    watch: Watch = False,
    port: Port = None,
    csv: Csv = None,
    as_json: Json = False,
) -> None:
    """Report the loss, speed, time and cost of a run, and its plan beside what was measured.

    A page with all of it and its curves is written to report.html in the run's folder. With
    --watch the page is served on this machine, and follows the run while it trains.

    windlass report quickstart
    windlass report quickstart --watch
    windlass report runs/mine-1a2b3c4d --json
    windlass report mine-1a2b3c4d --csv metrics.csv
    """
    _check(watch=watch, port=port, csv=csv, as_json=as_json)
    if watch:
        return _serve(ctx, [run], port)
    with ctx.obj.phase("looking at the run"):
        from windlass.api import report as call

        summary = call(run)
    if csv is not None:
        return _write_csv([summary], csv)
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
    page: Annotated[
        str | None, typer.Option(metavar="FILE", help="write a page with the curves of all runs")
    ] = None,
    watch: Watch = False,
    port: Port = None,
    csv: Csv = None,
    as_json: Json = False,
) -> int | None:
    """Compare runs: size, speed, memory, cost, losses, samples, and settings that differ.

    With --train a RUN may be a recipe too, which is trained to its end first, one after the other;
    the same command again resumes what was interrupted. Keys are then those of every recipe.
    --page writes a page with the curves of all runs in one plot, and --watch serves it live.

    windlass compare runs/mine-1a2b3c4d runs/mine-5e6f7a8b
    windlass compare mine-1a2b3c4d mine-5e6f7a8b other --json
    windlass compare mine-1a2b3c4d mine-5e6f7a8b --page compared.html
    windlass compare mine-1a2b3c4d mine-5e6f7a8b --watch
    windlass compare --train quickstart mine.yaml train.steps=300
    """
    _check(watch=watch, port=port, csv=csv, as_json=as_json)
    runs: Sequence[str | Path] = names or ()
    if not train and ctx.args:
        raise UserError(f"{ctx.args[0]} is a key of a recipe; --train trains recipes with it")
    if train and names and len(names) > 1:
        trained = _trained(names, ctx, Terminal(stderr=True) if as_json else None)
        if isinstance(trained, int):
            return trained
        runs = trained
    if watch and len(runs) > 1:
        return _serve(ctx, runs, port)
    with ctx.obj.phase("looking at the runs"):
        from windlass.api import compare as call

        comparison = call(*runs, page=page)
    if csv is not None:
        return _write_csv(comparison.runs, csv)
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
    if page is not None:
        say(Text.assemble(("\npage".ljust(NAME + 1), "bold"), page))
    return None


def _check(*, watch: bool, port: str | None, csv: str | None, as_json: bool) -> None:
    """Refuse options that do not go together."""
    chosen = {"--watch": watch, "--csv": csv is not None, "--json": as_json}
    several = [name for name, is_on in chosen.items() if is_on]
    if len(several) > 1:
        raise UserError(f"{several[0]} and {several[1]} are given; one of them at a time")
    if port is not None and not watch:
        raise UserError(f"--port is {port}; it needs --watch")


def _serve(ctx: typer.Context, names: Sequence[str | Path | None], port: str | None) -> None:
    """Serve the page of runs until Ctrl-C."""
    served = options(Served, port=port or "0")
    with ctx.obj.phase("looking at the runs"):
        from windlass.api import watch

        server = watch(*names, port=served.port)
    for line in _instructions(server.url, server.server_port, os.environ):
        say(Text(line))
    with server, ctx.obj.phase("serving the page"), ctx.obj.interrupts(server.shutdown):
        server.serve_forever()
    say(Text("\nstopped; the run is not touched by this"))


def _instructions(url: str, port: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Lines on where the page is; over ssh, how a browser at the other end gets there."""
    yield f"live at {url} on this machine; Ctrl-C ends it"
    if connection := environ.get("SSH_CONNECTION", "").split():
        host, number = connection[2], connection[3]
        extra = "" if number == "22" else f"-p {number} "
        yield (
            f"over ssh: on your own machine `ssh {extra}-NL {port}:127.0.0.1:{port} "
            f"{environ.get('USER', 'USER')}@{host}`, then open {url} there"
        )


def _write_csv(runs: Sequence[Any], file: str) -> None:
    from windlass.reports.csv_table import csv_table

    text = csv_table(runs)
    if file == "-":
        print(text, end="")
        return
    place = Path(file).expanduser()
    with writable(place):
        write(place, text)
    say(Text(f"written to {place}"))


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
    from windlass.units import count, duration, size

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
    yield from _bars("time by phase", run.goodput.seconds, duration, "green", width)
    if len(run.goodput.starts) > 1:
        yield from _starts(run.goodput)
    parts = (run.planned.get("memory") or {}).get("parts_bytes") or {}
    yield from _bars("memory, as planned", parts, size, "magenta", width)


def _table(lines: Sequence[tuple[str, str, str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("plan")
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _starts(time: Any) -> Iterator[Text | Table]:
    from windlass.reports.time_page import HEAD, lines

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEAD:
        table.add_column(name, no_wrap=True)
    for line in lines(time):
        table.add_row(*map(Text, line))
    yield Text("")
    yield table


def _bars(
    title: str, parts: Mapping[str, Any], show: Callable[[Any], str], style: str, width: int
) -> Iterator[Text]:
    """Parts as bars."""
    whole = max(parts.values(), default=0)
    if whole:
        yield Text(f"\n{title}", "bold")
    for name, value in parts.items():
        bar = "█" * max(1, round((width - 34) * value / whole))
        yield Text.assemble(f"  {name:<{WIDE}}{show(value):>10}  ", (bar, style))
