"""The command line: parse, call, print."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from windlass.config import shipped
from windlass.errors import UserError

app = typer.Typer(
    name="windlass",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RECIPE_KEYS = {"allow_extra_args": True, "ignore_unknown_options": True}
Recipe = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a recipe that ships with windlass.")
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(help="Keys that win over the recipe: train.steps=100, or --train.steps 100."),
]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step, not the newest.")]


def main() -> None:
    """Run the program; what a user can put right is printed alone."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]{escape(str(error))}[/]")
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has gone: `windlass schema | head`
        sys.stderr.close()
        sys.exit(141)


@app.callback()
def windlass() -> None:
    """Train language models on whatever accelerator there is, from one recipe.

    Start with [bold]windlass train quickstart[/]: a small model learns to write stories, on a CPU,
    in about a minute. The same command again goes on where it stopped.
    """


@app.command(context_settings=RECIPE_KEYS)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A YAML file, or the name of a shipped recipe.")
    ] = None,
    keys: Keys = None,
) -> None:
    """Train a recipe. The same command again resumes; without a recipe, lists those there are.

    Examples:

      windlass train quickstart

      windlass train quickstart train.steps=500 optim.learning_rate=1e-3

      windlass train my-recipe.yaml --device gpu --mesh.tensor 2
    """
    if recipe is None:
        return _list_recipes()
    # Before JAX is imported, which takes a while: a signal is heard from the first moment on.
    from windlass.training.signals import Signals

    with Signals().listening() as signals:
        with signals.phase("starting"):
            from windlass.calls import train as call
        trained = call(recipe, keys or (), signals=signals)
    if trained.stopped_by is not None:
        sys.exit(128 + trained.stopped_by)


@app.command(context_settings=RECIPE_KEYS)
def data(
    recipe: Recipe,
    keys: Keys = None,
    rows: Annotated[int, typer.Option(help="How many rows to show.")] = 3,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "train",
) -> None:
    """Show rows as the model will see them: documents, padding, what is trained on."""
    from windlass.calls import prepare
    from windlass.data.show import show

    console = Console()
    prepared = prepare(recipe, keys or (), console=Console(stderr=True))
    show(prepared, prepared.split(split), console, rows)


@app.command(context_settings=RECIPE_KEYS)
def evaluate(
    run: RunFolder,
    keys: Keys = None,
    split: Annotated[str, typer.Option(help="validation, test or train.")] = "validation",
    step: Step = None,
) -> None:
    """Measure the loss and perplexity of a run on rows it was not trained on."""
    from rich.table import Table

    from windlass.calls import evaluate as call

    found = call(run, keys or (), split=split, step=step)
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)


@app.command(context_settings=RECIPE_KEYS)
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")] = "",
    keys: Keys = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Among so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Among this share of probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer repetitions.")] = 1.0,
    tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 200,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another text.")] = 0,
    step: Step = None,
) -> None:
    """Write on from a prompt, printed as it comes."""
    from windlass.calls import stream
    from windlass.config import read
    from windlass.evaluation.generate import Sampling

    sampling = read(
        Sampling,
        dict(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            tokens=tokens,
            stop=stop or [],
            seed=seed,
        ),
        origin="the options",
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(prompt)}[/]", end="")
    for piece in stream(run, prompt, sampling, keys or (), step=step):
        console.print(escape(piece), end="")
        sys.stdout.flush()
    console.print()


@app.command()
def verify(run: RunFolder) -> None:
    """Check every fingerprint and every file of a run's checkpoints, and name what is damaged."""
    from windlass.checkpoint.verify import verify as call

    report = call(run)
    Console(highlight=False, soft_wrap=True).print(escape(str(report)))
    if not report.good:
        sys.exit(1)


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, so that an editor completes and explains its keys."""
    import json

    from windlass.calls import schema as call

    print(json.dumps(call(), indent=2))


def _list_recipes() -> None:
    console = Console(highlight=False)
    console.print("windlass train RECIPE, where RECIPE is a YAML file or one of")
    names = shipped()
    width = max(len(name) for name in names)
    for name, path in names.items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        console.print(f"  [bold]{name:<{width}}[/]  {escape(first)}")
