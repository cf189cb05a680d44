"""The loop: restore or initialise; then step, report, evaluate, save."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError

from windlass import markup
from windlass.checkpoint.store import Store
from windlass.config import Due
from windlass.data.load import Loader
from windlass.errors import UserError
from windlass.evaluation.harness import Harness
from windlass.planning import planner
from windlass.processes import hosts as processes
from windlass.processes.clock import Clock
from windlass.processes.signals import Signals
from windlass.program.built import InitialArrays
from windlass.program.step import Batch, Frozen, State
from windlass.run import checks
from windlass.run_folder import folder as folders
from windlass.starting import frozen_models, origin
from windlass.telemetry import metrics
from windlass.telemetry.compiles import Recompiled, Watch
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.memory import is_exhausted
from windlass.telemetry.metrics import CHECKPOINT, Meter
from windlass.telemetry.trackers import Trackers
from windlass.training import reference
from windlass.training.evaluations import Evaluations
from windlass.training.profiler import Profiler
from windlass.training.report import RunReport
from windlass.training.session import Session
from windlass.units import number

BETWEEN_STEPS = 30.0  # seconds without a line that are no silence: `telemetry.every` sets how many


class Trained(NamedTuple):
    """Outcome of a run."""

    folder: Path
    step: int
    is_finished: bool
    last: dict[str, float]  # metrics of the last evaluation, and before it of the last step
    stopped_by: int | None  # the number of the signal

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics by step, a row each, as `pandas.DataFrame` takes them."""
        return metrics.by_step(metrics.read(self.folder / folders.METRICS))

    def _repr_html_(self) -> str:
        """Table of the outcome, for a notebook."""
        state = "finished" if self.is_finished else "stopped"
        shown = {name: value for name, value in self.last.items() if "loss" in name}
        lines = [("run", str(self.folder)), ("state", f"{state} at step {self.step:,}")]
        return markup.facts(
            [*lines, *((name.replace("_", " "), number(value)) for name, value in shown.items())]
        )


class Loop:
    """One run, from where it stands to its end."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        signals: Signals,
        terminal: ConsoleReport,
        watch: Watch,
        tracked: Trackers,
        plans: bool = False,
        benchmarks: Harness | None = None,
    ):
        run = session.run
        self.watch, self.plans, self.terminal = watch, plans, terminal
        self.phases = watch.phases
        self.session, self.folder, self.signals = session, folder, signals
        self.train, self.steps = run.train, session.length.steps
        for key, what in checks.profile(run, self.steps):
            raise UserError(f"{key} {what}")
        self.abstract = session.programs.abstract_state()
        self.loader = Loader(
            session.prepared.split("train"),
            session.batches.rows,
            run.train.seed,
            run.data.shuffle,
            workers=run.data.workers,
            prefetch=run.data.prefetch,
        )
        shown = (terminal, watch, tracked)
        self.report = RunReport(session, self.loader, folder, *shown, plans, self.abstract)
        self.profiler = Profiler(run.profile, folder, self.report.peak, terminal)
        self.store = Store(
            folder, say=terminal.warning, keep=run.checkpoint.keep, best=run.train.watched
        )
        self.evaluations = Evaluations(
            session, folder, self.report, terminal, benchmarks, stops=self.is_stopping
        )

    def run(self) -> Trained:
        self.report.banner()
        self.evaluations.banner()
        if self.plans:
            name = "planning"
            with self.signals.phase(name), self.terminal.doing(name), self.phases(name):
                self.report.plan()
        try:
            with (
                self.signals.phase("restoring"),
                self.terminal.doing("restoring"),
                self.phases("initialise"),
                self.explains_exhaustion("while the weights were placed on the device"),
            ):
                state, frozen = self.restore_or_initialise()
            if self.is_finished(state):
                if folders.damaged(self.folder):
                    self.store_inputs()
                metrics = self.report.already_finished(state, self.evaluations.gives_up(state))
                return Trained(self.folder, int(state.step), True, metrics, None)
            return self.train_from(int(state.step), state, frozen)
        finally:
            self.store.close()

    def train_from(self, first: int, state: State, frozen: Frozen) -> Trained:
        # Not before the checkpoint was found to be of this run: a refusal changes nothing.
        self.store_inputs()
        with self.signals.phase("measuring the model"), self.terminal.doing("measuring the model"):
            self.report.model(self.session.built.whole(state.weights, frozen.model))
        self.phases.keep()
        self.report.begin(first)
        self.evaluations.truncate(first)
        if self.plans:
            self.report.planned()
        with (
            self.signals.phase("computing reference log-probabilities"),
            self.explains_exhaustion("while reference log-probabilities were computed"),
        ):
            reference.ensure(self.session, state, frozen, self.folder, self.terminal.console)
        processes.barrier("compiling the step")
        with (
            self.signals.phase("compiling the step"),
            self.explains_exhaustion("while the step was compiled"),
        ):
            step = self.compile(self.session.programs.stage(first))
        step = self.watch.debug.timed(step)
        self.terminal.fact("compiled", self.watch.summary())
        # Behind the compilation, beside which the stacks that go now were saved.
        with self.phases("checkpoint"):
            self.store.wait()
        with self.explains_exhaustion("while the frozen layers were taken apart"):
            frozen = self.session.programs.resident(frozen)
        if first == 0:
            with self.phases("checkpoint"):
                self.store.save(0, state, self.session.identity)
        with self.signals.waits():
            with (
                self.terminal.doing("training", patience=BETWEEN_STEPS),
                self.explains_exhaustion(None),
                self.loader.arriving(self.steps),
                self.phases.stepping(first),
            ):
                try:
                    state, latest = self.go(step, state, frozen, first)
                finally:
                    self.profiler.close()
            with self.terminal.doing("saving"), self.phases("checkpoint"):
                self.store.wait()
        return self.end(state, latest)

    def store_inputs(self) -> None:
        """Store what the run computes from: its recipe and its tokenizer."""
        if processes.is_first():
            prepared = self.session.prepared
            inputs = (prepared.vocabulary, prepared.folders, prepared.commit)
            folders.store(self.folder, self.session.run, *inputs)

    def go(
        self, step: Callable, state: State, frozen: Frozen, first: int
    ) -> tuple[State, dict[str, float]]:
        """Step, report, evaluate, save, until the last step, a signal or the end of patience."""
        run, latest = self.session.run, {}
        meter, programs = self.report.meter, self.session.programs
        stage = programs.stage(first)
        self.report.stage(stage)
        per_epoch = self.session.length.per_epoch
        intervals = (self.train.evaluate_every, run.checkpoint.every, run.telemetry.every)
        intervals += (run.tasks and run.tasks.every,)
        clock = Clock(*intervals)
        evaluation_due, save_due, report_due, tasks_due = (
            Due(x, per_epoch, clock) for x in intervals
        )
        self.terminal.start(self.steps, first)
        if not first:
            with meter.paused(), self.phases("evaluation"):
                self.evaluations.measure(0, state, frozen)
        self.profiler.begin(first)
        batches = self.loader.iterate(first, programs.place)
        for done in range(first + 1, self.steps + 1):
            if programs.stage(done - 1) != stage:
                stage = programs.stage(done - 1)
                self.report.stage(stage)
                with meter.paused():
                    step = self.compile(stage)
            with (
                self.saves_if_refused(state),
                self.profiler.step(done, self.program, state, meter),
            ):
                state, metrics = step(state, frozen, self.next_batch(meter, batches, state))
            meter.step(metrics["token_hash"])
            self.profiler.after(done, metrics, meter)
            self.watch.took(done)
            clock.step(done)
            ends = done == self.steps or self.signals.ends(done)
            evaluates = done == self.steps or evaluation_due(done)
            measures = done == self.steps or tasks_due(done)
            measures = measures or (evaluates and run.tasks is not None and not run.tasks.every)
            saves = ends or save_due(done) or self.is_left_alone()
            is_edge = done == first + 1 or programs.stage(done) != stage
            if evaluates or measures or saves or is_edge or report_due(done):
                latest = self.report.step(done, state, metrics)
            self.phases.stepped(done, meter.waited)
            if evaluates or measures:
                with meter.paused(), self.phases("evaluation"), self.saves_if_refused(state):
                    evaluations = self.evaluations
                    averages = evaluations.evaluate(done, state, frozen) if evaluates else {}
                    averages |= evaluations.measure(done, state, frozen) if measures else {}
                    state = evaluations.judged(done, state, averages)
                    latest |= averages
                saves = saves or int(state.progress.best_step) == done
                is_cut = run.tasks is not None and self.is_stopping()  # of one process
                if is_cut or (done < self.steps and self.is_finished(state)):
                    saves = ends = True
            if saves:
                with (
                    meter.paused(CHECKPOINT),
                    self.phases("checkpoint"),
                    self.terminal.doing("saving"),
                ):
                    if ends:
                        processes.barrier("the last save")
                    self.store.save(done, state, self.session.identity, latest)
                    self.report.measure()
            if ends:
                break
        return state, latest

    def next_batch(self, meter: Meter, batches: Iterator[Batch], state: State) -> Batch:
        """The next batch; where a stream can give none, what is trained so far is saved first.

        Of several processes others may have theirs, and are in the step.
        """
        try:
            return meter.next(batches)
        except UserError:
            if self.session.run.data.is_streamed and processes.count() == 1:
                self.store.save(int(state.step), state, self.session.identity)
                self.store.wait()
            raise

    def is_left_alone(self) -> bool:
        """True once, where nobody reads what is printed any more: the next may be a kill.

        Of several processes none knows that of the first before a step that all of them save at.
        """
        return processes.count() == 1 and self.terminal.has_lost_reader()

    @contextmanager
    def saves_if_refused(self, state: State) -> Iterator[None]:
        """Save what there is when `train.strict` refuses a program, which then has not run."""
        try:
            yield
        except Recompiled:
            self.store.save(int(state.step), state, self.session.identity)
            raise

    @contextmanager
    def explains_exhaustion(self, when: str | None) -> Iterator[None]:
        """Explain an out-of-memory error here in the terms of the model, and what would fit."""
        try:
            yield
        except JaxRuntimeError as error:
            if not self.plans or not is_exhausted(error):
                raise
            now = f"after step {self.watch.step}" if self.watch.has_begun else "in the first step"
            described, folder = self.session.built.described, self.folder
            self.store.wait()  # what is being saved is saved, and is what the run goes on from
            self.terminal.close()
            with self.terminal.doing("looking for what would fit"):
                text = planner.explain(described, str(error), when or now, folder)
            raise UserError(text) from error

    def restore_or_initialise(self) -> tuple[State, Frozen]:
        abstract, frozen = self.abstract
        frozen = frozen._replace(helpers={})  # which the run does not store
        restored = self.store.restore(abstract, self.session.identity)
        if restored is None:
            state, frozen = self.session.programs.init(self.initial_weights(), self.first_batch())
            if processes.is_first():
                origin.keep(self.session.run, self.folder)
            if jax.tree.leaves(frozen):
                self.store.save_frozen(frozen, self.session.identity)
            return state, self.with_helpers(frozen)
        if jax.tree.leaves(frozen):
            frozen = self.store.restore_frozen(frozen, self.session.identity)
        if restored.step > self.steps:
            length = self.session.length
            raise UserError(
                f"{length.requested}, and the run in {self.folder} has done {restored.step}; "
                f"{length.key(restored.step)} leaves it as it is, more goes on, "
                "and run.dir starts another run"
            )
        if not self.is_finished(restored.state):
            self.report.resumed(restored.step)
            frozen = self.with_helpers(frozen)
        return self.evaluations.rejudged(restored.state), frozen

    def first_batch(self) -> Batch | None:
        """The batch of step 0, where the objective makes its carry from it."""
        if not self.session.programs.starts_from_data:
            return None
        return next(self.loader.iterate(0, self.session.programs.place))

    def with_helpers(self, frozen: Frozen) -> Frozen:
        session = self.session
        vocabulary = session.prepared.vocabulary
        loaded, facts = frozen_models.take(session.built, vocabulary)
        self.terminal.banner(facts)
        return frozen._replace(helpers=loaded)

    def initial_weights(self) -> InitialArrays:
        """The weights that this run starts from, where it starts from any."""
        session = self.session
        vocabulary = str(session.identity["tokenizer"])
        say, console = self.terminal.warning, self.terminal.console
        start = origin.take(session.built, vocabulary, say, console)
        self.terminal.banner(start.facts)
        return start.arrays

    def is_finished(self, state: State) -> bool:
        return self.evaluations.gives_up(state) or int(state.step) >= self.steps

    def compile(self, stage: int) -> Callable:
        """The step of a stage for the shapes it will meet, before the first batch is there."""
        programs = self.session.programs
        step = programs.step(stage)
        program = self.program = step.prepare(*programs.abstract_call())
        if stage == len(programs.stages) - 1:  # the one that is planned
            self.report.compiled(program)
        return step

    def is_stopping(self) -> bool:
        """A signal came: what takes long is not waited for."""
        return self.signals.stop is not None

    def end(self, state: State, latest: dict[str, float]) -> Trained:
        done, stop = int(state.step), self.signals.stop or 0
        # One that is heard in the last step stops nobody, and is known to one process alone.
        stop = max(map(int, processes.each("stopped by", str(int(stop)))))
        is_finished = self.is_finished(state)
        self.phases.end("finished" if is_finished else "stopped")
        self.report.end(state, latest, is_finished)
        return Trained(self.folder, done, is_finished, latest, stop or None)
