"""The commands that generate with a run's model."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.text import Text

from windlass.cli.options import (
    CheckpointOptions,
    ModelName,
    Step,
    WhichWeights,
    options,
    waiting,
)
from windlass.config import section
from windlass.errors import UserError
from windlass.files import full_disk
from windlass.terminal import Terminal, harmless

Temperature = Annotated[str, typer.Option(metavar="X", help="sampling temperature; 0: greedy")]
TopK = Annotated[str | None, typer.Option(metavar="N", help="sample from the k likeliest tokens")]
TopP = Annotated[
    str | None, typer.Option(metavar="X", help="nucleus sampling: keep this probability mass")
]
Penalty = Annotated[str, typer.Option(metavar="X", help="above 1: fewer repetitions")]
Tokens = Annotated[str, typer.Option(metavar="N", help="max new tokens")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="stop sequence; repeatable")]
Seed = Annotated[str, typer.Option(metavar="N", help="random seed")]


def generate(
    ctx: typer.Context,
    run: ModelName = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="the text to continue")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="prompts: one per line, or JSON Lines with a prompt"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="with --file: write the JSON Lines to this file"),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N", help="with --file: batch size")] = "16",
    chat: Annotated[
        bool, typer.Option("--chat", help="with --file: a prompt is a user message")
    ] = False,
    temperature: Temperature = "0.8",
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Penalty = "1",
    tokens: Tokens = "200",
    stop: Stop = None,
    seed: Seed = "0",
    weights: WhichWeights = "last",
    step: Step = None,
) -> None:
    """Generate from a prompt, streamed, or from every prompt of a file.

    With --file each prompt gives a line of JSON: its own keys, and text. A .jsonl file has an
    object per line with a prompt, or with the messages of a chat to answer; any other file is plain
    text with a prompt per line. A prompt is continued as it stands; --chat applies the model's chat
    template, which messages always get.

    A run on sections (data.format.kind: sections) is asked a question, which gets the headings of
    its data up to data.format.response; a text that has headings of its own is continued as it
    stands. A line of a .jsonl file may have the columns in front of the response instead of a
    prompt.

    windlass generate quickstart "Once upon a time"
    windlass generate quickstart "One day" --temperature 0.5 --top-k 40
    windlass generate runs/mine-1a2b3c4d "Q: Why?" --stop Q: > answer.txt
    windlass generate quickstart --file prompts.txt --out stories.jsonl
    windlass generate Qwen/Qwen2.5-0.5B "One day"
    """
    chosen = options(CheckpointOptions, weights=weights, step=step)
    with ctx.obj.phase("generating"):
        from windlass import api

        how: dict[str, Any] = {**vars(chosen), **sampling(ctx)}
        if file is None:
            if out is not None:
                raise UserError(f"--out is {out}; it needs --file, and > is for one prompt")
            if chat:
                raise UserError("--chat needs --file; windlass chat RUN chats with a model")
            _write(api.stream(run, prompt or "", ctx.args, echo=True, **how))
            return
        if prompt is not None:
            raise UserError(f"--file is {file}, and a prompt is given too; leave one of them out")
        from windlass.evaluation import prompts

        examples, size = prompts.read(file), options(Batch, batch=batch).batch
        texts = api.each(run, examples, ctx.args, batch=size, chat=chat, **how)
        _write_lines([one.row for one in examples], texts, out)


def chat(
    ctx: typer.Context,
    run: ModelName = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="system prompt")] = None,
    thinking: Annotated[
        str,
        typer.Option(
            metavar="WHICH", help="of a reasoning model: on, off, or none (its own choice)"
        ),
    ] = "none",
    temperature: Temperature = "0.8",
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: Penalty = "1",
    tokens: Tokens = "512",
    stop: Stop = None,
    seed: Seed = "0",
    weights: WhichWeights = "last",
    step: Step = None,
) -> None:
    """Chat with a model, of a run or published, in the chat template it was trained with.

    The whole conversation is sent with each turn; to a run on sections each turn is a question by
    itself, under the headings of its data. Ctrl-C stops an answer, Ctrl-D leaves, /help
    lists commands. Through a pipe each line is a turn, and only answers are printed.

    windlass chat runs/mine-1a2b3c4d
    windlass chat mine --system "Answer in one sentence." --temperature 0.3
    windlass chat Qwen/Qwen2.5-0.5B-Instruct
    echo "What is a windlass?" | windlass chat mine
    """
    chosen = options(CheckpointOptions, weights=weights, step=step)
    with ctx.obj.phase("loading the model"):
        from windlass import api
        from windlass.cli.talk import Talk

        mode = vars(options(Thought, thinking=thinking))
        with waiting("loading the model"):
            talk = api.chat(run, ctx.args, system=system, **mode, **vars(chosen), **sampling(ctx))
    Talk(talk, ctx.obj).run()


@section
class Thought:
    """Thinking mode of a reasoning model."""

    thinking: Literal["none", "off", "on"]


@section
class Batch:
    """Batch size."""

    batch: int

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}; it must be 1 or more")


def _write_lines(examples: list[dict[str, Any]], texts: Iterable[str], out: str | None) -> None:
    """Write a line of JSON for each prompt, as soon as its text is there."""
    from windlass.data.progress import progress

    with (
        progress(Terminal(stderr=True), "generating", len(examples)) as tell,
        _opened(out) as file,
    ):
        for number, (example, text) in enumerate(zip(examples, texts, strict=True), start=1):
            file.write(json.dumps(example | {"text": text}, ensure_ascii=False) + "\n")
            file.flush()
            tell(number, "")


def sampling(ctx: typer.Context) -> dict[str, Any]:
    """The options of sampling, by the names that they have in the signatures above."""
    from windlass.config.sampling import Sampling

    names = Sampling.__dataclass_fields__.keys() & ctx.params.keys()
    given = {name: ctx.params[name] for name in names if ctx.params[name] is not None}
    return vars(options(Sampling, **given))


@contextmanager
def _opened(out: str | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return

    def refusal(error: OSError) -> str:
        return f"--out is {out}, which cannot be written: {error.strerror}"

    try:
        file = open(out, "w", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(refusal(error)) from None
    with full_disk(refusal), file:
        yield file


def _write(pieces: Iterator[str]) -> None:
    """Write a text whose first piece is the prompt: bold on a terminal, without control codes."""
    on_terminal = sys.stdout.isatty()
    with waiting("loading the model"):
        prompt = next(pieces)
        first = next(pieces, "")  # what is refused is refused before anything is written
    if on_terminal:
        Terminal(soft_wrap=True).print(Text(prompt, "bold"), end="")
    else:
        sys.stdout.write(prompt)
    for piece in chain([first], pieces):
        sys.stdout.write(harmless(piece) if on_terminal else piece)
        sys.stdout.flush()
    print()
