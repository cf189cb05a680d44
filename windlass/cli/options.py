"""Options shared by commands, how they are read, and output to a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from windlass.cli import completion
from windlass.config import section
from windlass.config.reading import attempt
from windlass.errors import UserError
from windlass.terminal import Terminal

T = TypeVar("T")
# Options are read as text, and then as a section of a recipe is: refusals are worded in one place.
WITH_KEYS = {"allow_extra_args": True}
LONG = 1000  # columns of a line that nothing may break
A_RECIPE = "a YAML file, or the name of a recipe shipped with windlass"
RecipeName = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help=A_RECIPE, autocompletion=completion.recipes),
]
OptionalRecipe = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE]", help=A_RECIPE, autocompletion=completion.recipes),
]
RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="a run folder, or a recipe with one run in ./runs",
        autocompletion=completion.runs,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="a run, or a model: a folder, an export, or OWNER/NAME on the hub",
        autocompletion=completion.runs,
    ),
]
Split = Literal["train", "validation", "test"]
Step = Annotated[str | None, typer.Option(metavar="N", help="checkpoint step; default: the newest")]
WhichWeights = Annotated[
    str,
    typer.Option("--weights", metavar="NAME", help="last, best (lowest validation loss) or ema"),
]

Coordinator = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="multi-host: address of process 0")
]
Processes = Annotated[str | None, typer.Option(metavar="N", help="multi-host: number of processes")]
ProcessIndex = Annotated[
    str | None, typer.Option(metavar="I", help="multi-host: index of this process, from 0")
]


@section
class CheckpointOptions:
    """Checkpoint options: which weights of a run, and of which step."""

    weights: Literal["last", "best", "ema"]
    step: int | None


def options(schema: type[T], names: dict[str, str] | None = None, /, **values: Any) -> T:
    """Read options as a section; `names` are those that are written otherwise than its fields."""
    value, problems = attempt(schema, values)
    if problems:
        written = {key: key.replace("_", "-") for key in values} | (names or {})
        lines = [f"--{written[key]} {what}" for key, what in problems]
        raise UserError("\n".join(lines))
    return value


def say(text: Text) -> None:
    Terminal(soft_wrap=True).print(text)


@contextmanager
def trimmed() -> Iterator[Console]:
    """A console for tables: a line that is piped is one line, and none ends in blanks."""
    console = Terminal()
    if not console.is_terminal:
        console.width = LONG
    with console.capture() as captured:
        yield console
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Progress line on a terminal, which may be updated, and nothing elsewhere."""
    # Not one of Rich's spinners: they hide the cursor, and a signal would leave it hidden.
    if not sys.stderr.isatty():
        yield lambda more: None
        return

    def tell(more: str) -> None:
        sys.stderr.write(f"\r\x1b[K{what}{more} ...")
        sys.stderr.flush()

    tell("")
    try:
        yield tell
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def agrees(question: str) -> bool:
    """Confirmation by a user at a terminal."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


def saved(text: str, file: str) -> Path:
    """Write a file for the user; one that holds something else is left alone."""
    place = Path(file).expanduser()
    try:
        if place.exists() and place.read_text(encoding="utf-8") != text:
            raise UserError(f"--save is {file}, which is there and holds something else")
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save is {file}, which cannot be written: {error.strerror}") from None
    return place
