"""The command that measures a run or a model: on held-out data, by tasks, or without any data."""

import json
from typing import Annotated

import typer
from rich.text import Text

from windlass.cli.options import (
    CheckpointOptions,
    ModelName,
    Split,
    Step,
    WhichWeights,
    options,
    say,
    trimmed,
    waiting,
)
from windlass.cli.report import WIDEST
from windlass.config import section
from windlass.errors import UserError
from windlass.terminal import Terminal

ERROR = "_stderr"  # ends the name of a standard error


@section
class Measured(CheckpointOptions):
    """The options of `evaluate`."""

    split: Split
    votes: int | None


@section
class TaskOptions(CheckpointOptions):
    """The options of `evaluate --tasks`."""

    limit: int | None
    shots: int | None
    tasks_from: str | None
    chat: bool | None


def evaluate(
    ctx: typer.Context,
    run: ModelName = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="of a model: a run or recipe whose data to take, a file, a folder, or OWNER/NAME",
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="validation, test or train")
    ] = "validation",
    weights: WhichWeights = "last",
    step: Step = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="other runs or models, as a,b, measured on the same data by the same objective",
        ),
    ] = None,
    votes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="puzzles: let the answers to N variants of each row vote, for pass@1 and pass@2",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="puzzles: write rows and answers, pass by pass, to a .npz file",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="lm-evaluation-harness tasks instead, as a,b"),
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="N", help="with --tasks: examples per task")
    ] = None,
    shots: Annotated[
        str | None, typer.Option(metavar="N", help="with --tasks: few-shot examples")
    ] = None,
    tasks_from: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="with --tasks: a folder of your own task YAML files"),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="with --tasks: apply the chat template; default: if the run trained on chats",
        ),
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option("--diagnose", help="measures of fixed random layers instead, without data"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure loss and perplexity of a run on held-out data, or its scores on public benchmarks.

    With --split test, validation is measured too, with a verdict on both. The run counts how often
    its test split was evaluated: what was selected on it is no longer tested by it. A model that is
    no run, such as the one that a run started from, is measured on the data that --data names.

    Of puzzles, --save keeps the answer to every row after every pass, for numpy.load: tokens,
    targets, answers [rows, passes, length], halt (the probability that it is right), and with
    --votes the two answers elected. Variants that vote are relabelled and turned puzzles, or copies
    of an ARC task, whose answers are taken back to the row itself.

    windlass evaluate quickstart
    windlass evaluate runs/mine-1a2b3c4d --split test --weights best
    windlass evaluate mine data.source.path=others.jsonl device=cpu
    windlass evaluate mine --tasks hellaswag,arc_easy --limit 200
    windlass evaluate Qwen/Qwen2.5-0.5B-Instruct --data mine
    windlass evaluate mine --beside runs/other-5e6f7a8b,Qwen/Qwen2.5-0.5B-Instruct
    windlass evaluate mine --diagnose
    windlass evaluate trm-sudoku --weights ema --votes 8 --save answers.npz
    """
    task_options = {"limit": limit, "shots": shots, "tasks_from": tasks_from, "chat": chat}
    by_row = {"votes": votes, "save": save}
    if diagnose:
        measures = {"data": data, "beside": beside, "tasks": tasks, **task_options, **by_row}
        measures |= {} if split == "validation" else {"split": split}
        for option in (name for name, value in measures.items() if value is not None):
            raise UserError(
                f"--{option.replace('_', '-')} is of what is measured on data, and --diagnose "
                "measures a model without; leave one of them out"
            )
        return _diagnose(ctx, run, options(CheckpointOptions, weights=weights, step=step), as_json)
    if tasks is not None:
        for option in (name for name, value in by_row.items() if value is not None):
            raise UserError(
                f"--{option} is of answers to rows of data, and --tasks has tasks of its own; "
                "leave one of them out"
            )
        return _tasks(
            ctx,
            run,
            tasks,
            options(TaskOptions, weights=weights, step=step, **task_options),
            as_json,
        )
    for option in (name for name, value in task_options.items() if value is not None):
        raise UserError(f"--{option.replace('_', '-')} is for --tasks, which is not given")
    measured = options(Measured, split=split, weights=weights, step=step, votes=votes)
    with ctx.obj.phase("evaluating"):
        from windlass.api import evaluate as call
        from windlass.api import subject
        from windlass.cli.evaluation import WIDTH, lines, table

        kind, subject_name = subject(run)
        others = [] if beside is None else [one.strip() for one in beside.split(",")]
        with waiting("evaluating"):
            metrics = call(
                subject_name, ctx.args, data=data, beside=others, save=save, **vars(measured)
            )
    facts = {kind: subject_name, "split": measured.split, "weights": measured.weights}
    if as_json:
        print(json.dumps(facts | metrics, indent=2))
        return
    for name, value in [*facts.items(), *lines(metrics)]:
        say(Text.assemble((f"{name:<{WIDTH}}", "bold"), value))
    if others:
        with trimmed() as console:
            console.print(table(subject_name, metrics))


def _tasks(
    ctx: typer.Context, run: str | None, tasks: str, chosen: TaskOptions, as_json: bool
) -> None:
    with ctx.obj.phase("evaluating"):
        from windlass.api import tasks as call
        from windlass.units import number

        with waiting("evaluating"):
            scores = call(
                run,
                [name.strip() for name in tasks.split(",")],
                ctx.args,
                limit=chosen.limit,
                shots=chosen.shots,
                folder=chosen.tasks_from,
                chat=chosen.chat,
                weights=chosen.weights,
                step=chosen.step,
            )
    if as_json:
        print(json.dumps(scores, indent=2))
        return
    width = max(len(name) for name in scores) + 2
    for name, values in scores.items():
        errors = {k.removesuffix(ERROR): x for k, x in values.items() if k.endswith(ERROR)}
        line = "  ".join(
            f"{metric} {number(value)}"
            + (f" ± {number(errors[metric])}" if metric in errors else "")
            for metric, value in values.items()
            if not metric.endswith(ERROR)
        )
        say(Text.assemble((f"{name:<{width}}", "bold"), line))


def _diagnose(
    ctx: typer.Context, run: str | None, chosen: CheckpointOptions, as_json: bool
) -> None:
    with ctx.obj.phase("diagnosing"):
        from windlass.api import diagnose as call
        from windlass.cli.evaluation import diagnosed

        with waiting("diagnosing"):
            found = call(run, ctx.args, **vars(chosen))
    if as_json:
        print(json.dumps(found._asdict(), indent=2))
        return
    with trimmed() as console:
        for line in diagnosed(found, min(Terminal().width, WIDEST)):
            console.print(line)
