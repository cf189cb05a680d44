"""The report of a run: banner, metrics, its plan beside what is measured, and the summary."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Array

from windlass.analysis.flops import step_flops
from windlass.checkpoint.store import folder_of, steps_in
from windlass.config import tree
from windlass.config.sections import flat
from windlass.data.load import Loader
from windlass.data.streams.rows import StreamedRows
from windlass.errors import UserError
from windlass.evaluation.harness import Score
from windlass.models import Introduced
from windlass.planning import planner, targets
from windlass.processes import hosts as processes
from windlass.program.length import schedule_change
from windlass.program.step import Frozen, State
from windlass.run_folder import folder as folders
from windlass.run_folder import plan_file, runs
from windlass.run_folder.plan_file import Forecast
from windlass.run_folder.relocation import relocation
from windlass.telemetry import about
from windlass.telemetry.about import About
from windlass.telemetry.alarm import Expected, ThroughputAlarm
from windlass.telemetry.compiles import Watch
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.memory import device_peak, memory, program_parts
from windlass.telemetry.metrics import LOGGING, Meter, Metrics
from windlass.telemetry.trackers import Trackers
from windlass.training import summary
from windlass.training.banner import banner, data_facts
from windlass.training.session import Session
from windlass.units import counted


class RunReport:
    """Report of a run, on the terminal and in the files of its folder."""

    def __init__(
        self,
        session: Session,
        loader: Loader,
        folder: Path,
        terminal: ConsoleReport,
        watch: Watch,
        trackers: Trackers,
        plans: bool,
        abstract: tuple[State, Frozen],
    ):
        self.session, self.loader, self.folder = session, loader, folder
        self.terminal, self.watch, self.trackers, self.plans = terminal, watch, trackers, plans
        self.described, self.steps = session.built.described, session.length.steps
        self.records = Metrics(folder / folders.METRICS)
        if self.records.mended is not None:
            terminal.warning(self.records.mended)
        self.about = About(folder / folders.ABOUT)
        self.forecast = Forecast(folder / folders.PLAN)
        self._abstract = abstract
        self._part: int | None = None  # of a stream, that was reported last
        self._unplanned: str | None = None  # why there is no plan

    @cached_property
    def meter(self) -> Meter:
        """Throughput and MFU, from its first use on: the first step."""
        session, rows, peak = self.session, self.loader.rows, self.peak
        return Meter(
            rows_per_step=session.batches.rows,
            tokens_per_step=_times(session.batches.rows, rows.tokens_per_row),
            read_per_step=self._read_per_step,
            peak_flops=peak and peak * len(self.described.devices),
            compiled=lambda: self.watch.seconds,
        )

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s of a device; None where it is not known."""
        described = self.described
        return described.chip and described.chip.peak.get(described.compute)

    @cached_property
    def alarm(self) -> ThroughputAlarm:
        """Throughput alarm, by the recipe or by the plan."""
        alarm, tokens = self.session.run.alarm, self._read_per_step
        return ThroughputAlarm(Expected.of(alarm, tokens, self.forecast.step_seconds), tokens)

    @property
    def _read_per_step(self) -> float | None:
        return _times(self.session.batches.rows, self.loader.rows.targets_per_row)

    def stage(self, number: int) -> None:
        """A stage begins: its steps take other FLOPs."""
        programs = self.session.programs
        if self.peak is not None:
            self.meter.flops_per_step = step_flops(programs, *self._abstract, number)
        if len(programs.stages) > 1:
            stage, first = programs.stages[number], programs.first_steps[number]
            count = f"stage {number + 1} of {len(programs.stages)}"
            self.terminal.note(f"{count} from step {first + 1} on: {stage.name}")

    def banner(self) -> None:
        self.terminal.banner(banner(self.session, self.loader, self.folder))

    def model(self, model: Any) -> None:
        """Facts of the model that trains, with its arrays, where it has any to tell."""
        if isinstance(model, Introduced) and processes.is_first():
            self.terminal.banner(model.facts())

    def begin(self, first: int) -> None:
        """The run trains from here on: what an earlier start wrote after this step is dropped."""
        before = self.records.read() if self.trackers.are_wanted else []
        self.records.truncate(first)
        built = self.session.built
        learned = self.session.run.objective.solved(built.abstract) or built.trainable.trained
        parameters = {"trainable": learned, "total": built.trainable.total}
        data = dict(data_facts(self.session, self.loader))
        facts = {"parameters": parameters, "data": data, **self.described.facts}
        self.about.begin(step=first, steps=self.steps, **facts)
        config = {**tree(self.session.run), "parameters": parameters}
        self.records.hyperparameters(first, flat(config))
        self.trackers.begin(first, config, before)
        self.watch.open(self.folder / folders.COMPILES, first)

    def resumed(self, step: int) -> None:
        """The run goes on from a checkpoint, perhaps on other devices or to another length."""
        self.terminal.note(f"resuming from step {step} of {self.steps} in {self.folder}")
        starts = about.read(self.about.path) if processes.is_first() else []
        here = self.described.facts["chose"]
        if starts and (note := relocation(starts[-1]["chose"], here)) is not None:
            self.terminal.note(note)
        before = runs.steps_of(self.folder)
        optimizer = self.session.run.optim
        if step and before is not None and before != self.steps and optimizer is not None:
            self.terminal.note(schedule_change(optimizer.rate, before, self.steps, step))

    def plan(self) -> None:
        """Plan the run, and write nothing yet."""
        rows, chose = len(self.loader.rows), self.described.facts["chose"]
        plan = self.forecast.begin
        self._unplanned = plan(
            self.described.run, chose, lambda: planner.plan(self.described, rows)
        )

    def planned(self) -> None:
        """The run is as planned from here on."""
        self.forecast.keep()
        if self._unplanned is not None:
            self.terminal.note(self._unplanned)
        if (line := plan_file.line({**self.forecast.whole, "measured": {}})) is not None:
            self.terminal.fact("plan", line)

    def compiled(self, program: Any) -> None:
        """The compiled step: its memory, beside the plan."""
        if self.plans:
            parts = program_parts(program, self.described.devices[0].platform)
            whole = parts and sum(parts.values())
            self.forecast.measured(compiler_bytes=whole, compiler_parts_bytes=parts)

    def measure(self) -> None:
        """Record peak memory and step time beside the plan, as far as they are known by now."""
        if self.plans:
            self.forecast.stepped(
                self.meter.steps,
                device_peak_bytes=device_peak(self.described.devices),
                step_seconds=self.meter.median,
                tokens_per_second=self.meter.tokens_per_second,
            )

    def step(self, done: int, state: State, metrics: dict[str, Array]) -> dict[str, float]:
        """The metrics of a step; a loss that is not finite ends the run, if none may be skipped."""
        # Not all as floats: a hash is written as the whole number that it is.
        values = {name: value.item() for name, value in metrics.items()}
        self._check_finite(state)
        if (optimizer := self.session.run.optim) is not None:
            values["learning_rate"] = float(optimizer.rate(self.steps)(done - 1))
        if (tokens := self.meter.tokens(done)) is not None:
            values["tokens"] = tokens
        values |= self.meter.read() | memory(self.described.devices)
        with self.meter.losing(LOGGING):
            values |= self._data_progress(done)
            self._record(done, values)
            self.terminal.step(done, values)
            self.watch.flush()
        if self.meter.reading and (warning := self.alarm.read(self.meter.reading)) is not None:
            self.terminal.warning(warning)
        return values

    def _data_progress(self, done: int) -> dict[str, int]:
        """Progress of a stream, and a line when training comes to another part of it."""
        progress, rows = self.loader.progress(done), self.loader.rows
        if isinstance(rows, StreamedRows) and progress["data_part"] != self._part:
            self._part = progress["data_part"]
            self.terminal.note(rows.described(self._part))
        return progress

    def evaluation(self, done: int, metrics: dict[str, float]) -> None:
        self._record(done, metrics)
        self.terminal.evaluation(done, metrics)

    def scores(self, done: int, scores: Mapping[str, Score]) -> dict[str, float]:
        """The scores of tasks as metrics, with their standard errors."""
        metrics = {name: score.value for name, score in scores.items()}
        errors = {f"{name}_stderr": score.stderr for name, score in scores.items()}
        self._record(done, metrics | {k: x for k, x in errors.items() if x is not None})
        self.terminal.scores(done, {name: (one.value, one.stderr) for name, one in scores.items()})
        return metrics

    def cut_short(self, done: int) -> None:
        """Tasks that a signal kept from being measured."""
        names = ",".join(self.session.run.tasks.names) if self.session.run.tasks else ""
        self.terminal.note(
            f"tasks of step {done} are not measured: the run is to stop; `windlass evaluate "
            f"{self.folder} --step {done} --tasks {names}` measures them"
        )

    def _record(self, done: int, values: dict[str, float]) -> None:
        self.records.write(done, values)
        self.trackers.write(done, values)

    def sample(self, done: int, text: str) -> None:
        self.records.text(done, "sample", text)
        self.trackers.text(done, "sample", text)
        self.terminal.sample(text)

    def already_finished(self, state: State, is_early: bool) -> dict[str, Any]:
        """Nothing is left to train; gives the last metrics."""
        done, how, more = int(state.step), "", []
        if done >= self.steps:
            more.append(self.session.length.key(2 * self.steps))
        if is_early:
            how = f", {self._early(state)}"
            more.append(f"train.patience={2 * state.progress.since}")
        self.terminal.note(
            f"this run is finished: step {done} of {self.steps} in {self.folder}{how}; "
            f"{' '.join(more)} would go on"
        )
        return self.records.last() or {}

    def end(self, state: State, latest: dict[str, float], is_finished: bool) -> None:
        done = int(state.step)
        self.about.end(at=done, is_finished=is_finished)
        self.records.end(done, is_finished)
        if processes.is_first():
            facts = [*self._summary(state, latest, is_finished)]
            self.records.text(done, "report", "\n".join(f"{name}: {fact}" for name, fact in facts))
            self.terminal.end(facts)

    def _summary(
        self, state: State, latest: dict[str, float], is_finished: bool
    ) -> Iterator[tuple[str, str]]:
        done, session, per_epoch = int(state.step), self.session, self.loader.batches_per_epoch
        records, whole = self.records.read(), self.terminal.seconds
        yield "trained", summary.trained(session, done, self.meter.tokens(done), per_epoch)
        yield from summary.losses(session, state, latest, records, per_epoch or done)
        yield from summary.scores(records, session.run.train.best)
        if (speed := summary.speed(self.meter)) is not None:
            yield "speed", speed
        yield "time", summary.spent(self.meter, whole, per_epoch)
        if (cost := summary.cost(targets.of(self.described.devices), whole)) is not None:
            yield "cost", cost
        if state.loss_scale is not None:
            scale, overflows = float(state.loss_scale.scale), int(state.loss_scale.overflows)
            yield "loss scale", f"{scale:g}, after {overflows} overflows"
        if skipped := int(state.progress.skipped):
            yield "skipped", f"{skipped} steps that were not finite"
        if is_finished and done < self.steps:
            yield "stopped", f"early at step {done} of {self.steps}: {self._early(state)}"
        yield "compiled", self.watch.summary()
        if (planned := plan_file.line(self.forecast.whole)) is not None:
            yield "plan", planned
        if not is_finished:
            yield "stopped", f"at step {done} of {self.steps}, saved"
        yield "files", summary.files(self.folder)
        if is_finished:
            yield "next", self._next()
            yield "next", f"windlass export {self.folder} --to FOLDER"
        else:
            yield "next", "the same command again resumes the run"

    def _early(self, state: State) -> str:
        """Reason of early stopping."""
        progress, by = state.progress, self.session.run.train.best
        # Of a task whose score is better the higher it is, the lowest cost is below 0.
        best = float(progress.best) if by is None else abs(float(progress.best))
        since, of = counted(int(progress.since), "evaluation"), f"{by} " if by else ""
        return f"no better in {since} than {of}{best:.4f} at step {progress.best_step}"

    def _next(self) -> str:
        vocabulary = self.session.prepared.vocabulary
        if vocabulary is None:
            return f"windlass evaluate {self.folder}"
        format = self.session.run.data.format
        if len(format.asked_columns) > 1:
            return f"windlass generate {self.folder} --file questions.jsonl"
        if format.asked_columns or (format.speaks and vocabulary.template is not None):
            return f"windlass chat {self.folder}"
        return f'windlass generate {self.folder} "Once upon a time"'

    def _check_finite(self, state: State) -> None:
        progress = state.progress
        if int(progress.not_finite) <= self.session.run.train.allowed:
            return
        bad = int(state.step)
        rows = ", ".join(str(row) for row in self.loader.row_numbers(bad - 1))
        saved = steps_in(folder_of(self.folder))
        last = self.records.last("gradient_norm")
        norm = (
            f" (gradient_norm {last['gradient_norm']:.2g} at step {last['step']})" if last else ""
        )
        what, advice = (
            "what the objective solves from",
            "Other keys of objective may keep it in the range of float32; ",
        )
        if self.session.run.objective.has_gradient:
            what, advice = (
                "loss or gradient",
                "A lower optim.learning_rate, a longer warm-up or a smaller optim.clip_norm may "
                "help; ",
            )
        others = int(progress.not_finite) - 1
        more = f", as were the {others} before it" if others else ""
        narrow = (
            "The loss scale has fallen to its floor, so that float16 is too narrow for this model: "
            "bfloat16 or float32 may do. "
        )
        raise UserError(
            f"{what} is not finite at step {bad}{norm}{more}; "
            f"its rows are {rows}. Nothing was saved after step {saved[-1] if saved else 0}. "
            f"{'' if state.loss_scale is None else narrow}"
            f"{advice}`windlass data` shows the rows; "
            "train.nonfinite=skip goes on without such steps"
        )


def _times(rows: int, each: float | None) -> float | None:
    return None if each is None else rows * each
