"""The command that caches what a teacher gives every token."""

import os
import sys
from typing import Annotated

import typer
from rich.text import Text

from windlass.cli.options import (
    Coordinator,
    OptionalRecipe,
    Processes,
    ProcessIndex,
    options,
    say,
    waiting,
)
from windlass.cli.writing import Batch, Seed, Temperature, Tokens, TopP, sampling
from windlass.errors import UserError
from windlass.processes.clusters import ClusterFlags, find
from windlass.processes.parent import stand_by


def teach(
    ctx: typer.Context,
    recipe: OptionalRecipe = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="write texts of the teacher instead, as JSON Lines, to this file"
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N", help="with --generate: batch size")] = "16",
    temperature: Temperature = "0.7",
    top_p: TopP = "0.9",
    tokens: Tokens = "512",
    seed: Seed = "0",
    imports: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="DIR",
            help="import a cache of another program instead: .npz or safetensors files",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="with --import: the folder to write")
    ] = None,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process: ProcessIndex = None,
) -> int | None:
    """Run a teacher over the data of a recipe, and cache its top logits for a student.

    The recipe is the student's: data.teacher.model is the teacher, and data.teacher.path the folder
    of the cache. Rows, bytes, time and cost are printed before it starts. The same command again
    resumes after a kill or a signal, which loses at most the shard under way.

    With --generate the teacher writes a text for every example instead: it continues texts, and
    answers chats in place of their last answers. A recipe whose data.source is that file trains on
    them.

    windlass teach mine.yaml
    windlass teach mine.yaml data.teacher.top_k=128 data.teacher.negatives=64
    windlass teach mine.yaml --generate answers.jsonl --tokens 200
    windlass teach --import old-cache --out cache
    """
    if recipe is None and imports is None:
        raise UserError("which recipe? One with data.teacher; or --import DIR --out DIR")
    if generate is not None:
        with ctx.obj.phase("generating"):
            from windlass.api import teach as call

            size = options(Batch, batch=batch).batch
            place = call(recipe, ctx.args, generate=generate, batch=size, **sampling(ctx))
        return say(Text(f"written to {place}"))
    if imports is not None or out is not None:
        with ctx.obj.phase("importing a cache"):
            from windlass.api import teach as call
            from windlass.units import size

            with waiting("importing"):
                cache = call(recipe, ctx.args, imports=imports, out=out)
        what = f"{cache.rows:,} rows, {cache.tokens:,} tokens, {size(cache.size_bytes)}"
        return say(Text(f"imported to {cache.folder}: {what}"))
    flags = options(ClusterFlags, coordinator=coordinator, processes=processes, process=process)
    hosts, signals = find(flags, os.environ), ctx.obj
    if hosts is not None and signals.line is None:
        return stand_by(sys.argv[1:], hosts, signals, lambda folder: None)
    if hosts is not None and hosts.process:
        signals.who = f"{hosts}: "
    from windlass.api import teach as call

    call(recipe, ctx.args, hosts=hosts, signals=signals)
    return None
