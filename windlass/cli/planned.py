"""Plans on a terminal: a table of them, and the details of each."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from windlass import units
from windlass.cli.options import LONG, trimmed
from windlass.planning.matrix import best, misfits
from windlass.planning.plan import Plan, Refused
from windlass.reports import reasons
from windlass.units import size

STYLES = {"yes": "green", "tight": "yellow", "no": "red"}
MONEY = ("run", "on demand", "spot")
COLUMNS = ("fits", "GiB per device", "step", "tokens/s", "MFU", *MONEY)
EPOCH = ("epoch on demand", "epoch spot")
# A colour for each part of memory and of a step, in their order.
COLOURS = (
    *("blue", "cyan", "bright_blue", "magenta", "bright_magenta", "yellow", "green"),
    *("bright_green", "bright_yellow", "bright_cyan", "red", "bright_red", "white"),
)
SMALL = 0.0005  # of the whole: parts below are in JSON alone
BAR = 40  # columns of a bar that is full, where there is room
BESIDE = 38  # columns that stand before it
EIGHTHS = ("", *"▏▎▍▌▋▊▉")


def print_plans(plans: Sequence[Plan | Refused]) -> None:
    """Print plans: tables, details and notes."""
    with trimmed() as console:
        for one in _one(plans, console) if _is_one(plans) else _several(plans, console):
            console.print(one)
        for message in misfits(plans):
            console.print(Text(f"\n{message}", "bold red"))


def _is_one(plans: Sequence[Plan | Refused]) -> bool:
    return len({one.name for one in plans}) == 1


def _one(plans: Sequence[Plan | Refused], console: Console) -> Iterator[Table | Text]:
    """One recipe: a table of targets, and the details of each."""
    yield from tables(plans, ("target",), COLUMNS, console)
    notes = [one.notes for one in plans if isinstance(one, Plan)]
    # A note of all plans is printed once.
    same = [note for note in notes[0] if len(notes) > 1 and all(note in more for more in notes)]
    for one in plans:
        yield Text.assemble("\n", (one.target.name, "bold"), f"  {reasons.heading(one.target)}")
        room = min(BAR, console.width - BESIDE)
        yield details(one, room, same) if isinstance(one, Plan) else Text(one.why, "red")
    yield from _notes(same)


def _several(plans: Sequence[Plan | Refused], console: Console) -> Iterator[Table | Text]:
    """Several recipes on several targets, a line each."""
    columns = ("fits", "batch", "it/s", "GiB per device", "tokens/s", "per chip", *MONEY, *EPOCH)
    first = ("recipe", "target")
    yield from tables(plans, first, columns, console)
    if any(one.keys for one in plans):
        fastest = best(plans)
        yield Text("\nthe fastest that fits" if fastest else "\nnone of them fits", "bold")
        yield from tables(fastest, first, columns, console, plans) if fastest else ()
    yield from notes_of(plans)


def notes_of(plans: Sequence[Plan | Refused]) -> Iterator[Text]:
    """Notes of several plans: each once, with the plans that it is of."""
    notes: dict[str, list[Plan | Refused]] = {}
    for one in plans:
        for note in one.notes if isinstance(one, Plan) else [one.why]:
            notes.setdefault(note, []).append(one)
    yield from _notes(f"{_whose(those, plans)}{note}" for note, those in notes.items())


def _whose(those: Sequence[Plan | Refused], plans: Sequence[Plan | Refused]) -> str:
    """Targets and recipes that a note is of, where it is not of all of them."""
    able = [one for one in plans if isinstance(one, Plan) or one in those]
    targets = dict.fromkeys(one.target.name for one in those)
    names = dict.fromkeys(one.name for one in those)
    parts = []
    if len(targets) < len({one.target.name for one in able}):
        parts.append(", ".join(targets))
    if len(names) < len({one.name for one in able if one.target.name in targets}):
        parts.append(", ".join(names))
    return "".join(f"{part}: " for part in parts)


def _notes(notes: Iterable[str]) -> Iterator[Text]:
    for number, note in enumerate(notes):
        yield Text.assemble("" if number else "\n", ("note  ", "bold"), (note, "yellow"))


def tables(
    plans: Sequence[Plan | Refused],
    first: Sequence[str],
    columns: Sequence[str],
    console: Console,
    among: Sequence[Plan | Refused] | None = None,
) -> Iterator[Table]:
    """Table of a line per recipe and target; several where one is too wide.

    `among` are the plans that these are compared with, where there are more than are shown.
    """
    among = plans if among is None else among
    wide = console.options.update(width=LONG)
    columns = columns if reasons.reads_alike(among) else (*columns, *reasons.TOKENS)
    shown: list[str] = []
    for name in columns:
        tried = _table(plans, (*first, *shown, name), among)
        if shown and Measurement.get(console, wide, tried).maximum > console.width:
            yield _table(plans, (*first, *shown), among)
            shown = []
        shown.append(name)
    yield _table(plans, (*first, *shown), among)


def _table(
    plans: Sequence[Plan | Refused], names: Sequence[str], among: Sequence[Plan | Refused]
) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        is_word = name in ("recipe", "target", "fits")
        shown.add_column(name, justify="left" if is_word else "right", no_wrap=True)
    for one in plans:
        cells = _cells(one, among)
        shown.add_row(*[cells.get(name, Text()) for name in names])
    return shown


def _cells(plan: Plan | Refused, plans: Sequence[Plan | Refused]) -> dict[str, Text]:
    names = {"recipe": Text(plan.name), "target": Text(plan.target.name, "bold")}
    if isinstance(plan, Refused):
        return names | {"fits": Text(plan.fits, STYLES[plan.fits])}
    texts = reasons.cells(plan) | {"per chip": _speed_up(plan, plans) or reasons.UNKNOWN}
    dim = "dim" if plan.fits == "no" else ""  # an estimate of what cannot run
    return {
        **names,
        "fits": Text(plan.fits, STYLES[plan.fits]),
        **{name: Text(text, "" if "GiB" in name else dim) for name, text in texts.items()},
    }


def _speed_up(plan: Plan, plans: Sequence[Plan | Refused]) -> str | None:
    """Throughput per chip, relative to the first plan of the same recipe, with whatever keys."""
    first = next(one for one in plans if isinstance(one, Plan) and one.recipe == plan.recipe)
    if plan.tokens_per_second is None or first.tokens_per_second is None:
        return None
    each = plan.tokens_per_second / plan.target.chips
    return f"{each / (first.tokens_per_second / first.target.chips):.2f}×"


def details(plan: Plan, room: int = BAR, without: Sequence[str] = ()) -> Table:
    """Memory by part, step time by part, reasons, and all notes but some."""
    shown = Table.grid(padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    notes = [("note", Text(note, "yellow")) for note in plan.notes if note not in without]
    for name, value in [*_facts(plan, room), *notes]:
        shown.add_row(f"  {name}", value)
    return shown


def _facts(plan: Plan, room: int) -> Iterator[tuple[str, Text]]:
    for name, text in reasons.layout(plan):
        yield name, Text(text)
    for name, text in reasons.compiled(plan):
        yield name, Text(text)
    yield "memory", Text(reasons.memory(plan), STYLES[plan.fits])
    memory = plan.memory
    scale = max(memory.limit, memory.total)
    for (name, count), colour in zip(memory.parts.items(), cycle(COLOURS), strict=False):
        if count > SMALL * memory.total:
            yield "", _bar(name, size(count), count / scale, room, colour)
    if (free := memory.limit - memory.total) > 0:
        yield "", _bar("free", size(free), free / scale, room, "dim", "░")
    if plan.time is not None:
        yield "step", Text(reasons.step(plan) or "")
        for (name, value), colour in zip(plan.time.parts.items(), cycle(COLOURS), strict=False):
            if value > SMALL * plan.time.seconds:
                yield (
                    "",
                    _bar(name, units.seconds(value), value / plan.time.seconds, room, colour),
                )
    for name, text in reasons.money(plan):
        yield name, Text(text)
    for name, text in reasons.changes(plan):
        yield name, Text(text, "cyan")


def _bar(name: str, text: str, share: float, room: int, colour: str, block: str = "█") -> Text:
    eighths = round(share * room * 8)
    part = EIGHTHS[eighths % 8] if block == "█" else ""
    return Text.assemble(
        f"{name:<13}{text:>10}  ", (f"{block * (eighths // 8)}{part}" or EIGHTHS[1], colour)
    )
