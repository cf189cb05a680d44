"""The commands."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from windlass.cli import (
    completion,
    doctor,
    export,
    launch,
    measuring,
    plan,
    prices,
    report,
    teaching,
    training,
    writing,
)
from windlass.cli.options import (
    A_RECIPE,
    WITH_KEYS,
    RecipeName,
    RunName,
    Split,
    agrees,
    options,
    say,
    trimmed,
    waiting,
)
from windlass.cli.words import Command, Commands
from windlass.config import listing, section, shipped
from windlass.devices import versions
from windlass.errors import PeerLost, UserError
from windlass.files import FULL
from windlass.processes.signals import Signals
from windlass.terminal import Terminal
from windlass.version import __version__

app = typer.Typer(
    name="windlass",
    cls=Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(words: list[str], signals: Signals) -> int:
    """Run a command line and return the exit code; what a user can put right is printed alone."""
    try:
        _check_surroundings(words)
        training.set_log_level(words)
        code = app(words, prog_name="windlass", standalone_mode=False, obj=signals) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it can still be said that this failed
        return code
    except UserError as error:
        return _refuse(f"{signals.who}{error}")
    except PeerLost as error:
        _refuse(f"{signals.who}{error}")
        return 1
    except typer.TyperException as error:
        what = error.format_message().rstrip(".")
        return _refuse(f"{what[:1].lower()}{what[1:]}; windlass --help says what there is")
    except (ImportError, RuntimeError) as error:  # JAX, as it is imported
        if (advice := versions.refusal(error)) is None:
            raise
        return _refuse(f"{signals.who}{advice}")
    except OSError as error:  # of the surroundings, and no fault of the user's or of ours
        _refuse(f"{signals.who}{_cause(error)}")
        return 1


@app.callback()
def program(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="the versions of windlass, JAX and Python")
    ] = False,
) -> None:
    """Train language models on whatever accelerator there is, from one recipe.

    To start: the first command below trains a small model on stories, on any CPU, in about two
    minutes. `windlass COMMAND --help` explains a command.

    windlass train quickstart
    windlass generate quickstart "Once upon a time"
    """
    if version:
        _print_version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


app.command(cls=Command, context_settings=WITH_KEYS)(training.train)
app.command(cls=Command, context_settings=WITH_KEYS)(plan.plan)
app.command(cls=Command, context_settings=WITH_KEYS)(teaching.teach)


@app.command(cls=Command)
def new(
    ctx: typer.Context,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="the YAML file to write")
    ] = None,
    base: Annotated[
        str,
        typer.Option("--from", metavar="RECIPE", help=A_RECIPE, autocompletion=completion.recipes),
    ] = "quickstart",
) -> None:
    """Write a recipe to edit, in which every key stands beside its meaning.

    It is made from a recipe shipped with windlass, or one of your own, and trains the same. Keys
    that are left out are there as comments, with their defaults. No file is overwritten.

    windlass new mine.yaml
    windlass new mine.yaml --from chat-lora
    """
    if file is None:
        raise UserError("which file? windlass new mine.yaml writes one")
    with ctx.obj.phase("writing a recipe"):
        from windlass.api import new as call

        place = call(file, base)
    say(Text(f"written to {place}; edit it, and windlass train {place} trains it"))


@app.command(cls=Command, context_settings=WITH_KEYS)
def data(
    ctx: typer.Context,
    recipe: RecipeName = None,
    rows: Annotated[str, typer.Option(metavar="N", help="sequences to show")] = "3",
    split: Annotated[str, typer.Option(metavar="NAME", help="train, validation or test")] = "train",
) -> None:
    """Show training sequences as the model sees them, and how full they are.

    Documents are coloured and tokens outside the loss dimmed; then counts of documents, sequences
    and tokens. No model is built, and no accelerator is needed.

    windlass data quickstart
    windlass data mine.yaml --rows 10 --split validation
    windlass data mine.yaml data.length=4096
    """
    shown = options(Shown, rows=rows, split=split)
    if recipe is None:
        raise UserError(f"which recipe? A YAML file, or {listing(shipped())}")
    with ctx.obj.phase("preparing the data"):
        from windlass.api import data as call
        from windlass.data.show import show

        prepared = call(recipe, ctx.args, console=Terminal(stderr=True))
        # A line is a line to whoever reads it with other tools; a terminal breaks it at words.
        console = Terminal()
        console.soft_wrap = not console.is_terminal
        show(prepared, prepared.split(shown.split), console, shown.rows)


app.command(cls=Command, context_settings=WITH_KEYS)(measuring.evaluate)
app.command(cls=Command, context_settings=WITH_KEYS)(writing.generate)
app.command(cls=Command, context_settings=WITH_KEYS)(writing.chat)
app.command(cls=Command)(export.export)
app.command(cls=Command, context_settings=WITH_KEYS)(launch.launch)


@app.command(cls=Command)
def verify(ctx: typer.Context, run: RunName = None) -> int:
    """Check every byte that a run computes from, or of an export, and report what is damaged.

    That is its checkpoints, recipe, tokenizer and prepared data. In place of a run it may be a
    folder of prepared data, such as ~/.cache/windlass, or the cache of a teacher. Read-only. Exits
    with 1 if anything is damaged.

    windlass verify quickstart
    windlass verify runs/mine-1a2b3c4d
    windlass verify mine-merged
    """
    with ctx.obj.phase("verifying"):
        from windlass.api import verify as call

        with waiting("reading every byte"):
            report = call(run)
    say(Text(str(report), "" if report.good else "red"))
    return 0 if report.good else 1


@app.command(cls=Command)
def runs(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN ...]",
            help="runs to show in full, or a folder of runs",
            autocompletion=completion.runs,
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="delete these runs, after confirmation")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="with --delete: skip the confirmation")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List runs with step, loss, size and age; show some in full, or delete them.

    Lists those in ./runs, or in the given folder. A run that is training is not deleted, nor are
    files in its folder that it did not write.

    windlass runs
    windlass runs quickstart
    windlass runs /data/runs --json
    windlass runs --delete mine-1a2b3c4d mine-5e6f7a8b
    """
    with ctx.obj.phase("looking at runs"):
        from windlass import api
        from windlass.cli import runs as shown

        if delete:
            return _delete(names or [], yes)
        paths = [Path(name).expanduser() for name in names or [api.RUNS]]
        if len(paths) == 1 and paths[0].is_dir() and not api.is_run(paths[0]):
            standings, is_list = api.runs(paths[0]), True
        else:
            is_list = names is None
            standings = [api.standing(name) for name in names or ()]
    if as_json:
        print(shown.as_json(standings))
    elif is_list:
        _list_runs(standings, paths[0])
    else:
        for number, one in enumerate(standings):
            print(end="\n" if number else "")
            for name, value in shown.facts(one):
                say(Text.assemble((f"{name:<13}", "bold"), value))


app.command(cls=Command)(report.report)
app.command(cls=Command, context_settings=WITH_KEYS)(report.compare)


@app.command(cls=Command)
def schema(ctx: typer.Context) -> None:
    """Print the JSON schema of a recipe, for completion in an editor.

    An editor with a YAML language server reads it from the first line of a recipe:
    `# yaml-language-server: $schema=recipe.schema.json`

    windlass schema > recipe.schema.json
    """
    with ctx.obj.phase("reading the sections"):
        from windlass.api import schema as call

        print(json.dumps(call(), indent=2))


app.command(cls=Command)(prices.prices)
app.command(cls=Command, context_settings=WITH_KEYS)(doctor.doctor)


@section
class Shown:
    """The options of `data`."""

    rows: int
    split: Split

    def __post_init__(self):
        if self.rows < 0:
            raise ValueError(f"rows is {self.rows}; it must be 0 or more")


def _refuse(what: str) -> int:
    console = Terminal(stderr=True, soft_wrap=True)
    console.print(Text(what, "red"))
    return 2


def _check_surroundings(words: list[str]) -> None:
    """Refuse what no command can work in."""
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):  # bytes of no UTF-8
            raise UserError(
                f"{word} in the command is not read as UTF-8, as names and texts must be; where a "
                "locale is to blame, PYTHONUTF8=1 in front of the command does it"
            )
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder was deleted; `cd` into one that is there") from None
    try:
        Path.home()
    except RuntimeError:
        raise UserError(
            "there is no home folder: HOME is not set, and this user has none; "
            "HOME=/tmp in front of the command sets one"
        ) from None


def _cause(error: OSError) -> str:
    """An error of the system in words: what was being read or written, and why it failed."""
    why = error.strerror or str(error) or type(error).__name__
    if error.filename:
        return f"{error.filename}: {why}"
    if error.errno not in (*FULL, errno.EPIPE):
        return why
    # Nothing more is written there, or the end of the interpreter would fail in it again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"the standard output cannot be written: {why}"


def _list_runs(standings: list[Any], folder: Path) -> None:
    from windlass.cli.runs import table

    if not standings:
        say(Text(f"no runs in {folder} yet; `windlass train quickstart` makes one in ./runs"))
        return
    with trimmed() as console:
        console.print(table(standings))
    for one in standings:
        if one.damage is not None:
            say(Text(one.damage, style="red"))


def _delete(names: list[str], yes: bool) -> None:
    from windlass import api
    from windlass.units import size

    if not names:
        raise UserError("which runs? windlass runs lists them, windlass runs --delete RUN deletes")
    standings = [api.standing(folder) for folder in dict.fromkeys(map(api.find, names))]
    for one in standings:
        api.check_deletable(one.folder)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(
                "deleting needs a confirmation, and this is no terminal; --yes skips it"
            )
        for one in standings:
            say(Text(f"{one.folder}, {size(one.size_bytes)}, {one.state} at step {one.step}"))
        if not agrees(f"delete {'it' if len(standings) == 1 else 'them'}? [y/N] "):
            say(Text("nothing was deleted"))
            return
    for one in standings:
        others = api.delete(one.folder)
        say(Text(f"deleted {one.folder}, {size(one.size_bytes)}"))
        if others:
            say(Text(f"kept, since the run did not write it: {listing(map(str, others), 'and')}"))


def _print_version() -> None:
    from importlib.metadata import version
    from platform import python_version

    print(f"windlass {__version__}, jax {version('jax')}, python {python_version()}")
