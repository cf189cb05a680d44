"""Progress of a long preparation: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10


@contextmanager
def progress(
    console: Console, what: str, total: int, *, of: Literal["items", "bytes"] = "items"
) -> Iterator[Callable[[int, str], None]]:
    """A progress bar; yields the function that advances it, of the count done and a note."""
    if not console.is_terminal:
        yield _lines(console, what, total, of)
        return
    count = DownloadColumn(binary_units=True) if of == "bytes" else MofNCompleteColumn()
    columns = [TextColumn(what), BarColumn(), count]
    columns += [TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, note="")
        yield lambda done, note: bar.update(task, completed=done, note=note)


def _lines(console: Console, what: str, total: int, of: str) -> Callable[[int, str], None]:
    last, unit = time.monotonic(), " bytes" if of == "bytes" else ""

    def advance(done: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            more = f", {note}" if note else ""
            console.print(f"{what}: {done:,} of {total:,}{unit}{more}", highlight=False)

    return advance
