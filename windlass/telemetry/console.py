"""Console output of a run: a progress bar on a terminal, plain lines anywhere else."""

import math
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from windlass.telemetry.heartbeat import PATIENCE, Doing, Heartbeat
from windlass.telemetry.output import LastingOutput
from windlass.terminal import Terminal
from windlass.units import count, duration, number

NAME_WIDTH = 12  # of the left column of facts
EVALUATED = ("validation_ema_", "validation_")  # printed before the first of several such numbers
RECENT, FEWEST = 10, 3  # losses that the next one is compared with, and before there is a warning
MANY = 4  # metrics that differ by their number, above which they are left to files and charts
PACES = 5  # readings that the time left follows from
STARVED = 0.1  # of a step spent waiting for data, above which there is a warning


STYLES = {"loss": "bold", "tasks": "bold", "stopped": "yellow", "skipped": "yellow", "next": "cyan"}


class ConsoleReport:
    """Console output of a run: facts, notes, warnings, steps, in the order of the calls.

    To be closed, or used in a `with`, since a bar hides the cursor and holds the last line. In a
    `with` it also prints what goes on when nothing else was printed for `patience` seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
    ):
        self._output = LastingOutput(sys.stdout)
        self.console = console or Terminal(file=cast(TextIO, self._output))
        self._is_read = not self._output.is_lost
        self._clock, self._began = clock, clock()
        # A notebook or a terminal that cannot move its cursor gets lines, as a pipe does.
        self._is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bar: Progress | None = None
        self._status: Status | None = None
        self._total, self._first = 0, 0
        self._is_starved, self._has_spiked = False, False
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACES)  # steps, seconds of all
        self._last = 0  # step that was reported last
        self._patience, self._spoke = patience, clock()
        self._doing: list[Doing] = []  # what goes on, the innermost last
        self._lock = threading.Lock()  # over what goes on, which a thread looks at
        self._heartbeat = Heartbeat(self.beat, min(1.0, patience))

    def __enter__(self) -> "ConsoleReport":
        self._heartbeat.start()
        return self

    def __exit__(self, *_) -> None:
        self._heartbeat.stop()
        self.close()

    def banner(self, facts: Iterable[tuple[str, str]]) -> None:
        """Facts about the run, one in a line."""
        for name, value in facts:
            self.fact(name, value)

    def fact(self, name: str, value: str) -> None:
        self._print(Text.assemble((f"{name:<{NAME_WIDTH}} ", "bold"), value))

    def note(self, text: str) -> None:
        self._print(Text(text))

    def warning(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), text))

    @contextmanager
    def phase(self, name: str, last: float | None = None) -> Iterator[list[str]]:
        """Something that takes a while, and then how long it took, with any remarks on it."""
        began, remarks = self._clock(), []
        with self.doing(name, last):
            yield remarks
        took = f"{name} took {duration(self._clock() - began)}"
        self._print(Text(", ".join([took, *remarks])))

    @contextmanager
    def doing(
        self, name: str, last: float | None = None, patience: float = 0, *, draws: bool = False
    ) -> Iterator[None]:
        """An activity for the heartbeat to report, and the seconds it took last time.

        With `patience` it may be silent for as many seconds, where others are reported sooner. One
        that `draws` may have a progress bar of its own, and the heartbeat prints lines above it.
        """
        with self._lock:
            self._doing.append(Doing(name, self._clock(), last, patience))
        is_alone = self._is_live and not draws and self._bar is None and self._status is None
        status = self.console.status(Text(f"{name} ...")) if is_alone else None
        try:
            if status is not None:
                self._status = status
                status.start()
            self._show(f"{name} ...")
            yield
        finally:
            with self._lock:
                self._doing.pop()
                is_inner = self._doing and self._bar is None
                self._show(f"{self._doing[-1].name} ..." if is_inner else "")
            if status is not None:
                self._end_status()

    def beat(self) -> None:
        """Report what goes on, if nothing was printed for a while: in place, or ever less often."""
        with self._lock:
            if not self._doing:
                return
            now, doing = self._clock(), self._doing[-1]
            quiet = now - max(doing.began, self._spoke)
            if quiet < max(self._patience, doing.patience):
                return
            if self._bar is not None or self._status is not None:
                self._show(doing.after(quiet))
            elif doing.reported < self._spoke or now - doing.reported >= self._pause(quiet):
                doing.reported = now
                self.console.print(Text(doing.after(quiet)), soft_wrap=True)

    def start(self, total: int, first: int = 0) -> None:
        """From here on there are steps, and `first` of them are done."""
        self._total, self._first, self._last = total, first, first
        if not self._is_live:
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[speeds]}", markup=False),
            TextColumn("{task.fields[doing]}", markup=False, style="dim"),
        )
        bar = Progress(*columns, console=self.console, refresh_per_second=4)
        bar.add_task("", total=total, completed=first, speeds="", doing="")
        self._bar = bar  # not before it has its task, which the heartbeat writes to
        self._end_status()  # a terminal has one line that is drawn in place
        self._bar.start()

    def step(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Progress line of a step: its loss, and how fast steps are now."""
        self._note_pace(step, metrics)
        self._progress(step, "  ".join(self._speeds(step, metrics)))
        self._warn_of_waiting(step, metrics)
        self._warn_of_spike(step, metrics)

    def _progress(self, step: int, speeds: str) -> None:
        if self._bar is not None:
            self._spoke = self._clock()
            self._bar.update(
                self._bar.task_ids[0], completed=step, speeds=speeds, doing="", refresh=True
            )
        else:
            self._print(Text(f"step {step:>{len(str(self._total))}}/{self._total}  {speeds}"))

    def evaluation(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Metrics of an evaluation, but for those of each of many layers or experts."""
        alike, parts, before = Counter(map(_unnumbered, metrics)), [], None
        for name, value in metrics.items():
            if name != _unnumbered(name) and alike[_unnumbered(name)] > MANY:
                continue
            of_what = next((group for group in EVALUATED if name.startswith(group)), "")
            title = name.removeprefix(of_what) if of_what == before else name
            parts.append(f"{title.replace('_', ' ')} {number(value)}")
            before = of_what
        self._print(Text.assemble(f"step {step}  ", ("  ".join(parts), "bold")))

    def scores(self, step: int, scores: Mapping[str, tuple[float, float | None]]) -> None:
        """Scores of tasks, each with its standard error where it has one."""
        parts = [
            f"{name} {number(value)}" + ("" if stderr is None else f" ± {number(stderr)}")
            for name, (value, stderr) in scores.items()
        ]
        self._print(Text.assemble(f"step {step}  ", ("  ".join(parts), "bold")))

    def sample(self, text: str) -> None:
        """Text that the model generated."""
        for line in text.splitlines():
            self._print(Text(f"  {line}", "cyan"))

    def end(self, summary: Iterable[tuple[str, str]] = ()) -> None:
        """Summary after the last step: plain lines, and on a terminal in colour and columns."""
        self.close()
        for name, value in summary:
            if self.console.is_terminal and name != "next":  # a command is copied as it stands
                row = Table.grid(padding=(0, 1, 0, 0))
                row.add_column(width=NAME_WIDTH, style="bold")
                row.add_column(overflow="fold")
                row.add_row(name, Text(value, _style(name, value)))
                self.console.print(row)
            else:
                heading = (f"{name:<{NAME_WIDTH}} ", "bold")
                self.console.print(
                    Text.assemble(heading, (value, _style(name, value))), soft_wrap=True
                )

    def has_lost_reader(self) -> bool:
        """True once, after standard output was found to lead nowhere any more."""
        is_new = self._is_read and self._output.is_lost
        self._is_read = self._is_read and not is_new
        return is_new

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._began

    def close(self) -> None:
        """Leave the terminal as it was found; closing twice does no harm."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _speeds(self, step: int, metrics: Mapping[str, int | float]) -> Iterator[str]:
        if "loss" in metrics:
            yield f"loss {number(metrics['loss'])}"
        if "tokens_per_second" in metrics:
            yield f"{count(metrics['tokens_per_second'])} tok/s"
        if "mfu" in metrics:
            yield f"{metrics['mfu']:.1%} MFU"
        if "data_part" in metrics:
            ahead = count(metrics["data_ahead_tokens"])
            yield f"part {metrics['data_part']}, {ahead} tokens ahead"
        if self._paces and step < self._total:
            steps, seconds = map(sum, zip(*self._paces, strict=True))
            yield f"{duration(seconds / steps * (self._total - step))} left"

    def _note_pace(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Note the pace since the last report; the first step's counts only alone."""
        steps, self._last = step - self._last, step
        if "step_ms" not in metrics or steps < 1:
            return
        if step - steps == self._first + 1:
            self._paces.clear()
        self._paces.append((steps, steps * metrics["step_ms"] / 1000))

    def _warn_of_waiting(self, step: int, metrics: Mapping[str, int | float]) -> None:
        # The first batch is always waited for: nothing was there to read it ahead of its use.
        if self._is_starved or step <= self._first + 1 or "data_wait_ms" not in metrics:
            return
        share = metrics["data_wait_ms"] / metrics["step_ms"]
        if share > STARVED:
            self._is_starved = True
            helps = "more data.workers or a larger data.prefetch may help"
            if "data_part" in metrics:
                helps = "the stream is slower than training, unless it is making batches that is: "
                helps += "data_ahead_tokens says which"
            self.warning(
                f"{share:.0%} of a step is spent waiting for data (see data_wait_ms in "
                f"metrics.jsonl); {helps}"
            )

    def _warn_of_spike(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Warn once of a loss that is finite, and twice the highest of the last ones, and a nat."""
        if not math.isfinite(loss := metrics.get("loss", math.nan)):
            return
        highest = max(self._losses, default=0.0)
        is_spike = len(self._losses) >= FEWEST and loss > highest + abs(highest) + 1
        if is_spike and not self._has_spiked:
            self._has_spiked = True
            self.warning(
                f"the loss jumped to {number(loss)} at step {step}, from {number(highest)} at most "
                f"in the {len(self._losses)} reports before; if it stays there, a lower "
                "optim.learning_rate, a longer warm-up or a smaller optim.clip_norm may help in "
                "another run, and `windlass data` shows the rows"
            )
        self._losses.append(loss)

    def _end_status(self) -> None:
        with self._lock:
            status, self._status = self._status, None
        if status is not None:
            status.stop()

    def _pause(self, quiet: int | float) -> int | float:
        return max(self._patience, min(quiet / 3, 60))

    def _show(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], doing=text, refresh=True)
        elif self._status is not None:
            self._status.update(Text(text))

    def _print(self, text: Text) -> None:
        self._spoke = self._clock()
        # Whoever reads a log with other tools wants a line to be a line, however long; a terminal
        # breaks it at words.
        self.console.print(text, soft_wrap=not self.console.is_terminal)


def _unnumbered(name: str) -> str:
    """Name of a metric without the number of a layer or an expert, if it has one."""
    return re.sub(r"_\d+$", "", name)


def _style(name: str, value: str) -> str:
    """Colour of a fact of the summary."""
    if name == "verdict":
        return "green" if value.startswith("generalises") else "yellow"
    return STYLES.get(name, "")
