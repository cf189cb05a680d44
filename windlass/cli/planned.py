"""Plans on a terminal: a table of them, and what is behind each."""

from collections.abc import Iterator, Sequence
from itertools import cycle

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from windlass.planning import figures
from windlass.planning.plan import Plan, Refused
from windlass.planning.targets import Target
from windlass.telemetry.console import size

STYLES = {"yes": "green", "tight": "yellow", "no": "red"}
# A colour for each part of memory and of a step, in their order.
UNKNOWN = "?"
LONG = 1000  # columns of a line that nothing may break
MONEY = ("run", "on demand", "spot")
COLOURS = (
    *("blue", "cyan", "bright_blue", "magenta", "bright_magenta", "yellow", "green"),
    *("bright_green", "bright_yellow", "bright_cyan", "red", "bright_red", "white"),
)
BAR = 40  # columns of a bar that is full
EIGHTHS = ("", *"▏▎▍▌▋▊▉")


def print_plans(found: Sequence[Plan | Refused]) -> None:
    """All that there is to say of some plans."""
    console = Console(highlight=False)
    if not console.is_terminal:  # other tools want a line to be a line, however long
        console.width = LONG
    same = _in_common([one.notes for one in found if isinstance(one, Plan)])
    with console.capture() as captured:
        for shown in tables(found, console):
            console.print(shown)
        if len({one.recipe for one in found}) == 1:
            for one in found:
                console.print(Text("\n").append_text(heading(one.target)))
                known = isinstance(one, Plan)
                console.print(details(one, same) if known else Text(one.why, "red"))
        else:
            for one in found:
                if isinstance(one, Refused):
                    console.print(Text(f"\n{one.recipe} on {one.target.name}: {one.why}", "red"))
        for note in same:
            console.print(Text.assemble(("\nnote  ", "bold"), (note, "yellow")))
    # Tables fill their lines up with blanks.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _in_common(notes: Sequence[list[str]]) -> list[str]:
    """What is to be said of all of several plans, and so once."""
    if len(notes) < 2:
        return []
    return [note for note in notes[0] if all(note in others for others in notes)]


def tables(found: Sequence[Plan | Refused], console: Console) -> list[Table]:
    """A line for each recipe on each target; in two tables where one is too wide.

    Of several recipes it also says how much a chip does beside one of the first target.
    """
    if len({one.recipe for one in found}) == 1:
        first, speeds = ("target",), ("fits", "GiB a device", "step", "tokens/s", "MFU")
    else:
        first = ("recipe", "target")
        speeds = ("fits", "batch", "it/s", "GiB a device", "tokens/s", "per chip")
    whole = _table(found, (*first, *speeds, *MONEY))
    if Measurement.get(console, console.options.update(width=LONG), whole).maximum > console.width:
        return [_table(found, (*first, *speeds)), _table(found, (*first, *MONEY))]
    return [whole]


def _table(found: Sequence[Plan | Refused], names: Sequence[str]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        is_word = name in ("recipe", "target", "fits")
        shown.add_column(name, justify="left" if is_word else "right", no_wrap=True)
    for one in found:
        cells = _cells(one, found)
        shown.add_row(*[cells.get(name, Text()) for name in names])
    return shown


def _cells(plan: Plan | Refused, found: Sequence[Plan | Refused]) -> dict[str, Text]:
    named = {"recipe": Text(plan.recipe), "target": Text(plan.target.name, "bold")}
    if isinstance(plan, Refused):
        return named | {"fits": Text("no", STYLES["no"])}
    memory, time, tokens = plan.memory, plan.time, plan.tokens_per_second
    error = None if time is None else time.error
    most = figures.gib(memory.total * (1 + memory.error))
    told = {
        "batch": str(plan.settings["batch"]),
        "step": time and figures.seconds(time.seconds, error),
        "it/s": time and figures.about(1 / time.seconds),
        "tokens/s": tokens and figures.count(tokens, error),
        "MFU": plan.mfu and figures.share(plan.mfu, error),
        "per chip": _speed_up(plan, found),
    }
    dim = "dim" if plan.fits == "no" else ""  # it would be so, if it could be
    return {
        **named,
        "fits": Text(plan.fits, STYLES[plan.fits]),
        "GiB a device": Text(f"{figures.gib(memory.total)}–{most} of {figures.gib(memory.limit)}"),
        **{name: Text(said or UNKNOWN, dim) for name, said in told.items()},
    }


def _speed_up(plan: Plan, found: Sequence[Plan | Refused]) -> str | None:
    """What a chip does, beside one of the first target of the same recipe."""
    first = next(one for one in found if isinstance(one, Plan) and one.recipe == plan.recipe)
    if plan.tokens_per_second is None or first.tokens_per_second is None:
        return None
    each = plan.tokens_per_second / plan.target.chips
    return f"{each / (first.tokens_per_second / first.target.chips):.2f}×"


def details(plan: Plan, without: Sequence[str] = ()) -> Table:
    """What fills the memory, what a step waits for, why, and all notes but some."""
    shown = Table.grid(padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    notes = [("note", Text(note, "yellow")) for note in plan.notes if note not in without]
    for name, value in [*_facts(plan), *notes]:
        shown.add_row(f"  {name}", value)
    return shown


def heading(target: Target) -> Text:
    hosts = f" on {target.hosts} hosts" if target.hosts > 1 else ""
    return Text.assemble((target.name, "bold"), f"  {target.devices} × {target.chip.name}{hosts}")


def _facts(plan: Plan) -> Iterator[tuple[str, Text]]:
    chosen = plan.settings
    kernel = f", {chosen['attention']} attention" if chosen["attention"] else ""
    groups = chosen["mesh"]["data"] * chosen["mesh"]["fsdp"]
    yield (
        "batch",
        Text(
            f"{chosen['batch']} rows of {chosen['row_tokens']:,} tokens: "
            f"{chosen['rows_per_device']} a device × {chosen['accumulation']} accumulation × "
            f"{groups} shards; {chosen['compute']}{kernel}, remat {chosen['remat']}"
        ),
    )
    split = " × ".join(f"{name} {size}" for name, size in chosen["mesh"].items())
    yield "mesh", Text(f"{split}{f' ({plan.mesh_reason})' if plan.mesh_reason else ''}")
    yield from _memory(plan)
    yield from _step(plan)


def _memory(plan: Plan) -> Iterator[tuple[str, Text]]:
    memory = plan.memory
    said = f"{figures.gib(memory.total)} of {figures.gib(memory.limit)} GiB a device"
    said += f", or up to {memory.error:.0%} more"
    if plan.fits == "no":
        said += f": {figures.gib(plan.lacks)} GiB too many"
    yield "memory", Text(said, STYLES[plan.fits])
    scale = max(memory.limit, memory.total)
    for (name, held), colour in zip(memory.parts.items(), cycle(COLOURS), strict=False):
        yield "", _bar(name, size(held), held / scale, colour)
    free = memory.limit - memory.total
    if free > 0:
        yield "", _bar("free", size(free), free / scale, "dim", "░")


def _step(plan: Plan) -> Iterator[tuple[str, Text]]:
    time = plan.time
    if time is None:
        return
    whole = figures.seconds(time.seconds, time.error)
    yield "step", Text(f"{whole}, waits for {time.bound} most")
    for (name, value), colour in zip(time.parts.items(), cycle(COLOURS), strict=False):
        if value:
            yield "", _bar(name, figures.seconds(value), value / time.seconds, colour)


def _bar(name: str, said: str, share: float, colour: str, block: str = "█") -> Text:
    eighths = round(share * BAR * 8)
    part = EIGHTHS[eighths % 8] if block == "█" else ""
    return Text.assemble(
        f"{name:<13}{said:>10}  ", (f"{block * (eighths // 8)}{part}" or EIGHTHS[1], colour)
    )
