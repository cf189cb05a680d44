"""The command that shows the prices of chips, and replaces them."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from windlass.cli.options import say, trimmed
from windlass.config import listing
from windlass.errors import UserError

COLUMNS = ("chip", "provider", "region", "on demand", "spot", "date", "note")


def prices(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHIP ...]", help="only these chips, such as v5e or h100"),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="use the prices in this YAML file from now on"),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="go back to the shipped prices")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show the prices of chips, in USD per chip and hour, or replace them.

    Prices are data with a date, and nothing is fetched. A file for --update has the keys `date`,
    `sources` (a list) and `prices`: a list of `chip`, `provider`, and where known `region`,
    `on_demand`, `spot`, `date` and `note`; `pods: true` is of TPU slices beyond one host. It is
    checked, and kept in the user's configuration folder (docs/prices.md).

    windlass prices
    windlass prices v5e v6e h100
    windlass prices --update prices.yaml
    windlass prices --reset
    """
    if reset and update is not None:
        raise UserError("one thing at a time: --update and --reset are given")
    with ctx.obj.phase("looking at prices"):
        from windlass.api import prices as call
        from windlass.planning import prices as known

        table = call(names or (), update=update, reset=reset)
    if as_json:
        plain = [one._asdict() for one in table.prices]
        shown = {"date": table.date, "age_days": known.days(table.date), "file": str(table.file)}
        shown |= {"sources": table.sources, "prices": plain, "unknown": table.unknown}
        print(json.dumps(shown, indent=2))
        return
    if table.prices:
        with trimmed() as console:
            console.print(_table(table.prices))
    if table.unknown:
        say(Text(f"no price is known of {listing(table.unknown, 'and')}"))
    if update is not None:
        say(Text("used from now on; `windlass prices --reset` goes back to the shipped ones"))
    origin = "shipped with windlass" if table.file == known.SHIPPED else str(table.file)
    say(Text(f"{origin}, of {table.date}, from {listing(table.sources, 'and')}"))
    if warning := known.warning(table.prices):
        say(Text(warning, "yellow"))


def _table(prices: Sequence) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("on demand", "spot") else "left")
    for price in prices:
        notes = ["slices beyond one host"] * price.pods + [price.note or ""]
        table.add_row(
            *(price.name, price.provider, price.region or ""),
            *(_dollars(price.on_demand), _dollars(price.spot), price.date, " ".join(notes)),
        )
    return table


def _dollars(price: float | None) -> str:
    return "unknown" if price is None else f"{price:.3f}"
