"""The command that rents machines for a run, shows their status, and deletes them."""

import shlex
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from windlass.cli.options import OptionalRecipe, agrees, saved, say
from windlass.errors import UserError
from windlass.terminal import Terminal
from windlass.units import size

NAMES = {"skypilot": "SkyPilot", "gke": "GKE", "tpu-vm": "a queued resource"}


def launch(
    ctx: typer.Context,
    recipe: OptionalRecipe = None,
    on: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="v6e-8, v5p-8, 2xv6e-16, 8xh100, ...")
    ] = None,
    to: Annotated[
        str, typer.Option(metavar="TARGET", help="skypilot, gke (a JobSet) or tpu-vm (a script)")
    ] = "skypilot",
    spot: Annotated[
        bool, typer.Option("--spot", help="preemptible machines, which are cheaper; needs --bucket")
    ] = False,
    region: Annotated[
        str | None,
        typer.Option(metavar="REGION", help="only in us-east5, or of GPUs only on aws"),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="only in this zone, such as us-east5-b")
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="gs://NAME or gs://NAME/PATH to store the run in"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="name of the launch, its run and its machines"),
    ] = None,
    install: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="what pip installs; default: this windlass, from its origin"
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="keep the machines, and pay for them, after training")
    ] = False,
    save: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="write the task, manifest or script to this file"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the file and what it would do, without renting")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="skip confirmations")] = False,
    status: Annotated[
        str | None, typer.Option(metavar="NAME", help="show the status of a launch")
    ] = None,
    stop: Annotated[
        str | None, typer.Option(metavar="NAME", help="stop its training, which can be resumed")
    ] = None,
    delete: Annotated[
        str | None, typer.Option(metavar="NAME", help="delete its machines, but not the bucket")
    ] = None,
) -> int | None:
    """Rent TPUs or GPUs for a recipe, train on them, and delete them; or show what was rented.

    The recipe is checked for the slice before anything is rented. Files of this computer that it
    names, and a wheel of the clone that windlass is used from, are uploaded to the bucket first.
    The machines install windlass and run `windlass train` with the same keys; after a preemption
    training resumes from the bucket, as does the same launch at any time. --dry-run prints the file
    without uploading or renting. Without a recipe, lists launches.

    windlass launch quickstart --on v6e-1 --dry-run
    windlass launch mine.yaml --on v6e-8 --spot --bucket gs://mine/runs
    windlass launch mine.yaml --on 8xh100 --spot --bucket gs://mine
    windlass launch mine.yaml --on 2xv6e-16 --to gke --bucket gs://mine
    windlass launch mine.yaml --on v5p-8 --to tpu-vm --bucket gs://mine
    windlass launch --status mine-1a2b3c4d
    windlass launch --delete mine-1a2b3c4d
    """
    verbs = {"status": status, "stop": stop, "delete": delete}
    actions = {verb: which for verb, which in verbs.items() if which is not None}
    if actions:
        others = [*([recipe] if recipe else []), *(["--dry-run"] if dry_run else [])]
        return _after(ctx, actions, others, yes)
    if recipe is None:
        return _list()
    if on is None:
        raise UserError("on which slice? --on v6e-8, for one; --on 2xv6e-16 is two slices")
    with ctx.obj.phase("preparing a launch"):
        import jax

        # An accelerator is not needed, and so not taken from whoever else may use it.
        jax.config.update("jax_platforms", "cpu")
        from windlass.launch import find, preparing, running, uploading

        how = find(to)
        prepared = preparing.prepare(
            recipe,
            ctx.args,
            on=on,
            spot=spot,
            region=region,
            zone=zone,
            bucket=bucket,
            name=name,
            install=install,
            keep=keep,
        )
        how.check(prepared)
        text = how.write(prepared)
        _summarize(prepared, how, to)
        if save is not None:
            _note(f"written to {saved(text, save)}")
        if dry_run:
            print(text, end="")
            if prepared.uploads:
                _note("nothing was uploaded; the same without --dry-run uploads before it rents")
            if why := running.obstacle(prepared, how):
                _note(Text(f"NOT TO BE RUN AS IT IS: {why}", "bold red"))
            return None
        if why := running.obstacle(prepared, how):
            raise UserError(why)
        running.check(how)
        uploading.check(prepared)
        total = sum(upload.size_bytes for upload in prepared.uploads)
        first = f"upload {size(total)} and " if total else ""
        if not yes and not _may(f"{first}rent {prepared.slices.name} now? [y/N] "):
            _note("nothing was uploaded or rented" if total else "nothing was rented")
            return None
    # The program that runs now handles Ctrl-C itself, and cleans up.
    with ctx.obj.interrupts(lambda: None):
        code = running.start(prepared, to)
    if code:
        _note(f"this failed; `windlass launch --delete {prepared.name}` deletes what there is")
    elif to != "tpu-vm":  # the script has seen it through
        _note(f"`windlass launch --status {prepared.name}` shows its status")
    return code


def _after(ctx: typer.Context, actions: dict[str, str], others: list[str], yes: bool) -> int:
    """Show the status of a launch, stop it or delete it."""
    if others or len(actions) > 1:
        words = [*others, *(f"--{verb} {which}" for verb, which in actions.items())]
        raise UserError(f"one thing at a time: {' and '.join(words)} are given")
    (verb, which), *_ = actions.items()
    with ctx.obj.phase("looking at launches"):
        from windlass.launch import records, running

        record = records.named(which)
        if verb == "delete" and not yes:
            if not _may(f"delete {record.slices} of {record.name}? [y/N] "):
                _note("nothing was deleted")
                return 0
    with ctx.obj.interrupts(lambda: None):
        code = getattr(running, verb)(record)
    if verb == "delete" and not code:
        run = "" if record.run is None else f"; the run is in {record.run}"
        _note(f"deleted {record.name}{run}")
    if verb == "stop" and not code:
        _note(f"stopped; `windlass launch --delete {record.name}` deletes what may be left of it")
    return code


def _list() -> None:
    from windlass.launch import records

    launches = records.every()
    if not launches:
        say(Text("nothing was launched yet; windlass launch RECIPE --on v6e-8 --dry-run shows how"))
    for one in launches.values():
        spot = "spot " if one.is_spot else ""
        place = one.run or "no bucket"
        say(Text(f"{one.name}  {spot}{one.slices}  {NAMES[one.target]}  {place}  {one.when}"))


def _summarize(prepared: Any, how: Any, to: str) -> None:
    """Print a summary of a launch, on the stream that is not the file's."""
    from windlass.launch import gpus

    slices = prepared.slices
    hosts = f"{slices.hosts} host{'s' if slices.hosts > 1 else ''}"
    chips = f"{slices.chips} chip{'s' if slices.chips > 1 else ''}"
    facts = [("launch", f"{prepared.name} on {slices.name} ({chips}, {hosts}) by {NAMES[to]}")]
    facts += [("creates" if not i else "", line) for i, line in enumerate(how.does(prepared))]
    if (hourly := gpus.price(prepared)) is not None:
        facts.append(("price", hourly))
    for number, upload in enumerate(prepared.uploads):
        what = f"a wheel of {upload.source}" if upload.is_built else str(upload.source)
        text = f"{what}, {size(upload.size_bytes)}, to {upload.to}"
        facts.append(("" if number else "uploads", text))
    facts.append(("runs", shlex.join(prepared.train)))
    facts.append(("run", prepared.run or "on the machine alone"))
    for name, value in facts:
        _note(Text.assemble((f"{name:<9}", "bold"), value))
    if prepared.bucket is None:
        warning = (
            "without --bucket the run is lost with the machine, which is kept, and paid for, "
            f"until windlass launch --delete {prepared.name}"
        )
        _note(Text(warning, "yellow"))


def _may(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UserError("this needs a confirmation, and this is no terminal; --yes skips it")
    return agrees(question)


def _note(text: Text | str) -> None:
    console = Terminal(stderr=True, soft_wrap=True)
    console.print(text if isinstance(text, Text) else Text(text))
