"""The command that estimates a run before anything is rented."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from windlass.cli import completion
from windlass.cli.options import options, waiting
from windlass.config import Limits, listing, section, shipped
from windlass.errors import UserError
from windlass.terminal import Terminal


@section
class Planned(Limits):
    """The options of `plan`."""

    rows: int | None
    preemptions: float | None
    best: Literal["cheapest", "fastest"] | None

    def wrong(self) -> list[str]:
        wrong = []
        if self.rows is not None and self.rows < 1:
            wrong.append(f"rows is {self.rows}; it must be 1 or more")
        if self.preemptions is not None and self.preemptions < 0:
            wrong.append(f"preemptions is {self.preemptions:g}; it must be 0 or more")
        return [*wrong, *super().wrong()]


def plan(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="a YAML file or a shipped recipe; several as A,B",
            autocompletion=completion.recipes,
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="TARGETS",
            help="v5e-8,2xv6e-16,h100,8xh200,cpu,here: TPU slices, GPUs, this machine",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="N", help="sequences per epoch, if the data is not here"),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="prices of this region or provider; default: cheapest"),
    ] = None,
    preemptions: Annotated[
        str | None,
        typer.Option(metavar="N", help="preemptions of a spot machine per hour, such as 0.1"),
    ] = None,
    each: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="plan each value of a key; repeatable"),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            metavar="[cheapest|fastest]",
            help="search for the best settings and target, and print the recipe lines",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="leave out what costs more")
    ] = None,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="leave out what takes longer: 90min, 6h, 2d")
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="also write an HTML page with charts")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="fit time estimates to finished runs: all, or RUN RUN"),
    ] = False,
    compiles: Annotated[
        bool,
        typer.Option("--compile", help="compile for the target; the device is not needed"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Estimate whether a run fits, how fast it is and what it costs, before renting anything.

    From shapes alone, in about a second per target: no weights are allocated, nothing is compiled,
    and the devices need not be here. The table has a line per target: peak memory per device,
    expected and at most, of what a program may use; step time, tokens per second of full sequences,
    and MFU; run time and cost, on demand and on spot machines. ± is the error of each estimate.
    Below it: memory by part, step time by part, why the mesh was chosen, and the prices with their
    dates.

    With --compile the step is lowered and compiled for the target from shapes alone, and memory is
    the compiler's own figure: libtpu's for TPUs, on an x86-64 host; the local compiler's for the
    GPU or CPU that is here; and that of JAX's CUDA plugin for other GPUs. It takes seconds to a
    minute per target; results are cached by program, flags and compiler. A missing compiler is
    reported.

    Without --on: this machine, and v5e-1, v5e-8, v6e-1, v6e-8, a100 and h100. Several recipes, or
    several values of a key with --each, share one table, with the throughput per chip relative to
    the first target; of the values of the last key, the fastest that fits is listed. Exits with 1
    if a recipe is not certain to fit on any target, and reports by how much it is too large.

    --best searches for the settings with which a recipe fits and is fastest: microbatch,
    rematerialisation, mesh and layers per loop. What is computed stays the same, and so do keys of
    the command line. It prints the lines for the recipe, and the cheapest or the fastest target.

    windlass plan quickstart
    windlass plan mine.yaml --on v5e-8,v6e-1,v6e-8,h100,h200 --html plan.html
    windlass plan mine.yaml --on v5e-8 train.batch=64 train.remat=full
    windlass plan mine.yaml,other.yaml --on v3-8,v4-8,a100 --rows 50000
    windlass plan mine.yaml --on v6e-1,v6e-8 --each train.batch_per_device=4,8,16
    windlass plan mine.yaml --on v5e-8,v6e-1,h200 --best --budget 50 --within 6h
    windlass plan mine.yaml --on v6e-8 --region us-east5 --preemptions 0.1
    windlass plan mine.yaml --on v5e-8 --compile
    windlass plan --calibrate
    """
    if calibrate:
        return _calibrate([name for name in (recipe, *ctx.args) if name])
    numbers = {"rows": rows, "preemptions": preemptions, "budget": budget, "within": within}
    chosen = options(Planned, **numbers, best=best)
    if chosen.best and each:
        raise UserError(
            "--each and --best are given; --each plans the values named, --best searches"
        )
    if recipe is None:
        raise UserError(f"which recipe? A YAML file, or {listing(shipped())}")
    if html is not None and not (folder := Path(html).expanduser().parent).is_dir():
        raise UserError(f"--html is {html}; there is no folder {folder}")
    names = list(dict.fromkeys(name.strip() for name in recipe.split(",") if name.strip()))
    with ctx.obj.phase("planning"):
        import jax

        if on is not None and "here" not in on.lower() and not compiles:
            # An accelerator is not needed, and so not taken from whoever else may use it.
            jax.config.update("jax_platforms", "cpu")
        from windlass import api
        from windlass.cli.best import print_bests
        from windlass.cli.planned import print_plans
        from windlass.reports.plan_page import page

        how: dict[str, Any] = vars(chosen) | {"within": chosen.within and chosen.within.written()}
        goal = how.pop("best")
        how |= {"region": region, "compiles": compiles, "console": Terminal(stderr=True)}
        bests: list[Any] = []
        with waiting("planning") as tell:
            if goal is None:
                plans = api.plans(names, on, ctx.args, each=each or (), **how)
            else:
                how |= {"wanted": goal, "tell": lambda more: tell(f" {more}")}
                bests = [api.best(name, on, ctx.args, **how) for name in names]
                plans = [getattr(one, "plan", one) for best in bests for one in best.each]
        if html is not None:
            _write(html, page(plans, shlex.join(["windlass", "plan", *_words(ctx)]), bests))
        if as_json:
            dicts = [one for best in bests for one in best.as_dicts()]
            print(json.dumps(dicts or [one.as_dict() for one in plans], indent=2))
        elif bests:
            print_bests(bests, names, ctx.args)
        else:
            print_plans(plans)
    return 0 if _fit(plans) else 1


def _calibrate(runs: list[str]) -> int:
    from windlass import api
    from windlass.planning import calibration

    for one in api.calibrate(*runs):
        factors = ", ".join(f"{name} {x:.2f}x" for name, x in one.factors.items())
        print(f"{one.chip}, from {len(one.runs)} runs: {factors} of the time by its table")
        errors = f"were off by {one.before:.1%}, and are by {one.after:.1%} (medians)"
        if one.after == one.before:
            errors = f"are off by {one.after:.1%} (median), and no factor improves them"
        print(f"  plans {errors}")
    print(f"plans use this from now on; delete {calibration.file()} to undo it")
    return 0


def _fit(plans: list[Any]) -> bool:
    """Test that every recipe is certain to fit on one target at least."""
    fitting = {one.recipe for one in plans if hasattr(one, "memory") and one.fits == "yes"}
    return all(one.recipe in fitting for one in plans)


def _words(ctx: typer.Context) -> list[str]:
    """Arguments of the command, as they could be written."""
    params = {name: value for name, value in ctx.params.items() if value}
    recipe, options = params.pop("recipe"), []
    for name, value in params.items():
        option = {"as_json": "--json", "compiles": "--compile"}.get(name, f"--{name}")
        values = value if isinstance(value, list | tuple) else [value]
        options += [word for one in values for word in (option, *([] if one is True else [one]))]
    return [recipe, *options, *ctx.args]


def _write(file: str, text: str) -> None:
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html is {file}, which cannot be written: {error.strerror}") from None
