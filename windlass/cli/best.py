"""The best settings of recipes on a terminal: what to write, what is gained, and why."""

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.cli.options import trimmed
from windlass.cli.planned import COLUMNS, notes_of, tables
from windlass.planning.plan import Plan
from windlass.planning.search import Best
from windlass.planning.winner import Ranking
from windlass.reports import gains, reasons


def print_bests(found: Sequence[Ranking], names: Sequence[str], keys: Sequence[str]) -> None:
    """Every recipe: a table of targets, what to write for each, and which target is best.

    `names` and `keys` are what the command line says of recipes, and to be said again.
    """
    with trimmed() as console:
        for number, (one, name) in enumerate(zip(found, names, strict=True)):
            if len(found) > 1:
                console.print(Text("\n" * bool(number) + name, "bold"))
            for shown in _shown(one, ["windlass", "train", name, *keys], console):
                console.print(shown)


def _shown(found: Ranking, command: list[str], console: Console) -> Iterator[Table | Text]:
    plans = [one.plan if isinstance(one, Best) else one for one in found.each]
    yield from tables(plans, ("target",), COLUMNS, console)
    for one in found.each:
        target = one.plan.target if isinstance(one, Best) else one.target
        yield Text.assemble("\n", (target.name, "bold"), f"  {reasons.heading(target)}")
        yield _details(one, command) if isinstance(one, Best) else Text(one.why, "red")
    yield from notes_of([one for one in plans if isinstance(one, Plan)])
    if found.note:
        yield Text.assemble(("note  ", "bold"), (found.note, "yellow"))
    if found.winner is not None and len(found.each) > 1:
        yield Text.assemble("\n", (f"{found.by}  ", "bold"), gains.winning(found))


def _details(best: Best, command: list[str]) -> Table:
    shown = Table.grid(padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, said in gains.gain(best):
        shown.add_row(f"  {name}", Text(said))
    if best.keys:
        lines = best.yaml.splitlines()
        for number, line in enumerate(lines):
            shown.add_row("" if number else "  write", Text(line, "green"))
        shown.add_row("  or", Text(shlex.join([*command, *best.words]), "cyan"))
    return shown
