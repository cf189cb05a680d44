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


def print_bests(rankings: Sequence[Ranking], names: Sequence[str], keys: Sequence[str]) -> None:
    """Print for every recipe a table of targets, what to write for each, and the best target.

    `names` and `keys` are those of the command line, to be printed again.
    """
    with trimmed() as console:
        for number, (one, name) in enumerate(zip(rankings, names, strict=True)):
            if len(rankings) > 1:
                console.print(Text("\n" * bool(number) + name, "bold"))
            for shown in _shown(one, ["windlass", "train", name, *keys], console):
                console.print(shown)


def _shown(ranking: Ranking, command: list[str], console: Console) -> Iterator[Table | Text]:
    plans = [one.plan if isinstance(one, Best) else one for one in ranking.each]
    yield from tables(plans, ("target",), COLUMNS, console)
    for one in ranking.each:
        target = one.plan.target if isinstance(one, Best) else one.target
        yield Text.assemble("\n", (target.name, "bold"), f"  {reasons.heading(target)}")
        yield _details(one, command) if isinstance(one, Best) else Text(one.why, "red")
    yield from notes_of([one for one in plans if isinstance(one, Plan)])
    if ranking.note:
        yield Text.assemble(("note  ", "bold"), (ranking.note, "yellow"))
    if ranking.winner is not None and len(ranking.each) > 1:
        yield Text.assemble("\n", (f"{ranking.by}  ", "bold"), gains.winning(ranking))


def _details(best: Best, command: list[str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in gains.gain(best):
        grid.add_row(f"  {name}", Text(text))
    if best.keys:
        lines = best.yaml.splitlines()
        for number, line in enumerate(lines):
            grid.add_row("" if number else "  write", Text(line, "green"))
        grid.add_row("  or", Text(shlex.join([*command, *best.words]), "cyan"))
    return grid
