"""The command that says what a run would be, before anything is rented."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from windlass.cli.options import options, waiting
from windlass.config import listing, section, shipped
from windlass.errors import UserError


@section
class Planned:
    """The options of `plan`."""

    rows: int | None

    def __post_init__(self):
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}; it must be 1 or more")


def plan(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="a YAML file or one that ships; several as A,B"),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="TARGETS",
            help="v5e-8,2xv6e-16,h100,8xh200,cpu,here: slices of TPUs, GPUs, this machine",
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="N", help="rows of an epoch, where the data is not here to tell"),
    ] = None,
    each: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="plan for each value of a key; may be said again"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for a program")] = False,
) -> int:
    """Say whether a run fits, how fast it would be and what it would cost; rent nothing.

    windlass plan quickstart
    windlass plan mine.yaml --on v5e-8,v6e-1,v6e-8,h100,h200
    """
    asked = options(Planned, rows=rows)
    if recipe is None:
        raise UserError(f"which recipe? A YAML file, or {listing(shipped())}")
    names = [name.strip() for name in recipe.split(",") if name.strip()]
    with ctx.obj.phase("planning"):
        import jax

        if on is not None and "here" not in on.lower():
            # An accelerator is not needed, and so not taken from whoever else may use it.
            jax.config.update("jax_platforms", "cpu")
        from windlass import calls
        from windlass.cli.planned import print_plans

        with waiting("planning"):
            asking = {"rows": asked.rows, "each": each or (), "console": Console(stderr=True)}
            found = calls.plans(names, on, ctx.args, **asking)
        if as_json:
            print(_json(found))
        else:
            print_plans(found)
    return 0 if _fit(found) else 1


def _fit(found: list[Any]) -> bool:
    """Whether every recipe fits on one target at least, for certain."""
    fitting = {one.recipe for one in found if getattr(one, "fits", "no") == "yes"}
    return all(one.recipe in fitting for one in found)


def _json(found: list[Any]) -> str:
    return json.dumps([one.as_dict() for one in found], indent=2)
