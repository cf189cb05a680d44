"""The loop: restore or initialise; then step, report, evaluate, save."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError

from windlass import markup
from windlass.checkpoint.store import Store, folder_of, newest_step, steps_in
from windlass.config import AnyRecipe, Due, tree
from windlass.data.load import Loader
from windlass.errors import UserError
from windlass.evaluation.harness import Harness
from windlass.planning import planner
from windlass.processes import hosts as processes
from windlass.processes.clock import Clock
from windlass.processes.clusters import Hosts, find
from windlass.processes.peers import Peers, check_devices, together
from windlass.processes.signals import Signals
from windlass.program.built import InitialArrays
from windlass.program.described import Described, Divided
from windlass.program.step import Batch, Frozen, State
from windlass.run import checks
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.starting import frozen_models, origin
from windlass.starting.describe import describe
from windlass.telemetry import compile_debug, metrics, trackers
from windlass.telemetry.compile_debug import CompileDebug
from windlass.telemetry.compiles import Recompiled, Watch
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.memory import is_exhausted
from windlass.telemetry.metrics import CHECKPOINT, Meter
from windlass.telemetry.phases import Phases
from windlass.telemetry.trackers import Trackers
from windlass.terminal import Terminal
from windlass.training import answers, reference, tasks
from windlass.training.profiler import Profiler
from windlass.training.report import RunReport
from windlass.training.samples import Writer
from windlass.training.session import Evaluator, Session, open_session
from windlass.training.tasks import TaskEvaluator
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


def train(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    *,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: ConsoleReport | None = None,
    plans: bool = False,
    page: Callable[[Path], str] | None = None,
    debug_compile: bool = False,
    began: float | None = None,
) -> Trained:
    """Train a recipe to its last step, from wherever an earlier call of the same left it.

    Where several processes make this call they train one run: `hosts` is the place of this one, or
    it is found as `windlass train` finds it. One that `plans` notes what it will take, and explains
    it where memory runs out. `page` makes the report of a run, in HTML, which its trackers get at
    its end. `debug_compile` logs compilations, writes programs and times the first steps. The time
    of the run counts from `began`, or from this call. JAX must not have touched a device before.
    Unlike a command, a call has no parent: SIGTERM still stops all processes after the same step,
    but when another process is lost, JAX ends this one, in its own words; and what another process
    refuses is printed here before this one ends, too.
    """
    settings: dict[str, Any] = {"hosts": hosts or find(None, os.environ)}
    settings |= {"plans": plans, "page": page, "debug_compile": debug_compile, "began": began}
    if signals is None:
        with Signals().listening() as signals:
            return train(recipe, overrides, signals=signals, report=report, **settings)
    hosts = settings["hosts"]
    if report is None:
        # The run is reported once: by the first process.
        is_first = hosts is None or hosts.process == 0
        with ConsoleReport(None if is_first else Terminal(quiet=True)) as report:
            return train(recipe, overrides, signals=signals, report=report, **settings)
    with together(hosts, signals, newest_step) as peers:
        given = recipe, overrides, signals, report, peers, plans, page
        return _train(*given, debug_compile, Phases(began))


def _train(
    recipe: AnyRecipe,
    overrides: Sequence[str],
    signals: Signals,
    report: ConsoleReport,
    peers: Peers | None,
    plans: bool,
    page: Callable[[Path], str] | None,
    debug_compile: bool,
    phases: Phases,
) -> Trained:
    parts, notes = compile_debug.requested(debug_compile, os.environ)
    for note in notes:
        report.note(note)
    debug = CompileDebug(parts, report.note)
    with signals.phase("reading the recipe"), phases("devices"):
        described = describe(recipe, overrides, doing=partial(report.doing, draws=True))
        trackers.check(described.run.telemetry)
    benchmarks = None
    if described.run.tasks is not None:
        with signals.phase("loading the tasks"), report.doing("loading the tasks"):
            benchmarks = tasks.load(described.run)
    if described.run.train.microbatch and described.divided is None and plans:
        with signals.phase("choosing the microbatch"), report.doing("choosing the microbatch"):
            described = _divided(described)
    folder = described.folder
    if peers is not None:
        peers.compare(tree(described.run))
        check_devices(peers.hosts.processes, described.devices)
        peers.trains_in(folder)
    for other in folders.siblings(folder, described.name, described.run):
        report.note(f"another run of {described.name}: {other}")
    for note in described.chosen.notes:
        report.note(note)
    for warning in described.warnings:
        report.warning(warning)
    former = folders.compiles(folder, described.name)
    strict, cache = described.run.train.strict, described.compile_cache
    settings = (described.run.telemetry, report.warning, report.fact)
    with Trackers(folder, *settings) as tracked:
        with (
            folders.roomy(folder),
            folders.locked(folder),
            phases.recording(folder / folders.PHASES, report.warning),
            described.scope(),
            debug.on(),
            Watch(
                report, strict=strict, cache=cache, former=former, phases=phases, debug=debug
            ) as watch,
        ):
            trained = _trained(described, signals, report, watch, tracked, plans, benchmarks)
        if tracked.are_on:
            _hand_over(tracked, trained, report, page)
    return trained


def _trained(
    described: Described,
    signals: Signals,
    report: ConsoleReport,
    watch: Watch,
    tracked: Trackers,
    plans: bool,
    benchmarks: Harness | None,
) -> Trained:
    folder = described.folder
    folders.check_shared(folder)
    if processes.is_first():
        runs.check_checkpoints(folder)
    is_new = processes.broadcast("is new", lambda: not steps_in(folder_of(folder)))
    searching = "looking for the weights to start from"
    with signals.phase(searching), report.doing(searching, draws=True), watch.phases("initialise"):
        if described.run.start is not None and is_new:
            origin.check(described.run.start)
        frozen_models.check(described.run)
    reading = "preparing the data"
    with signals.phase(reading), report.doing(reading, draws=True), watch.phases("data"):
        session = open_session(described, report.console)
    return Loop(session, folder, signals, report, watch, tracked, plans, benchmarks).run()


def _hand_over(
    tracked: Trackers, trained: Trained, report: ConsoleReport, page: Callable[[Path], str] | None
) -> None:
    """Send the report of a run that came to an end, and end it in its trackers."""
    with report.doing("waiting for trackers"):
        if page is not None:
            try:
                tracked.page(trained.step, "report", page(trained.folder))
            except UserError as error:  # of a file that somebody edited meanwhile
                report.warning(f"trackers get no report of the run: {error}")
        tracked.close(trained.is_finished)


def _divided(described: Described) -> Described:
    """A run with its microbatches chosen, for `auto`; the first process decides for all."""
    chosen = processes.broadcast("microbatch", lambda: planner.divide(described)._asdict())
    return dataclasses.replace(described, divided=Divided(**chosen))


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
        self.evaluator: Evaluator | None = None
        if run.data.holds_out("validation"):
            self.evaluator = Evaluator(session, "validation")
        self.tasks: TaskEvaluator | None = None
        if benchmarks is not None:
            self.tasks = TaskEvaluator(session, folder, benchmarks, self.is_stopping)
        self.writer = Writer(session, folder) if run.train.sample else None
        drawn = answers.picture(session)
        self.answers = None if drawn is None else answers.AnswerWriter(session, folder, drawn)

    def run(self) -> Trained:
        self.report.banner()
        if self.tasks is not None:
            self.terminal.fact("tasks", self.tasks.described)
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
                metrics = self.report.already_finished(state, self.gives_up(state))
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
        if self.writer is not None:
            self.writer.truncate(first)
        if self.tasks is not None:
            self.tasks.truncate(first)
        if self.plans:
            name = "planning"
            with self.signals.phase(name), self.terminal.doing(name), self.phases(name):
                self.report.plan()
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
                self.measure(0, state, frozen)
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
                    averages = self.evaluate(done, state, frozen) if evaluates else {}
                    averages |= self.measure(done, state, frozen) if measures else {}
                    state = self.judged(done, state, averages)
                    latest |= averages
                saves = saves or int(state.progress.best_step) == done
                is_cut = self.tasks is not None and self.is_stopping()  # of one process
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
        return self.rejudged(restored.state), frozen

    def rejudged(self, state: State) -> State:
        """The state without a best that another metric than that of this recipe found."""
        before = processes.broadcast("best by", lambda: folders.best_by(self.folder))
        if before == self.train.best:
            return state
        names = [one or "the loss on held-out data" for one in (before, self.train.best)]
        self.terminal.note(f"the best so far was by {names[0]}, and is now by {names[1]}")
        return state._replace(progress=state.progress.unjudged())

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
        return self.gives_up(state) or int(state.step) >= self.steps

    def gives_up(self, state: State) -> bool:
        patience = self.train.patience
        return patience is not None and int(state.progress.since) >= patience

    def compile(self, stage: int) -> Callable:
        """The step of a stage for the shapes it will meet, before the first batch is there."""
        programs = self.session.programs
        step = programs.step(stage)
        program = self.program = step.prepare(*self.abstract, programs.abstract_batch())
        if stage == len(programs.stages) - 1:  # the one that is planned
            self.report.compiled(program)
        return step

    def evaluate(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        """Averages on held-out rows; samples and answers are written beside them."""
        with self.terminal.doing("evaluating"):
            return self.evaluated(done, state, frozen)

    def evaluated(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        averages = {}
        if self.evaluator is not None:
            parts = {"validation": state.weights, "validation_ema": state.ema}
            for name, weights in parts.items():
                if weights is not None:
                    means = self.evaluator(weights, frozen, state.carry, state.step)
                    averages |= {f"{name}_{metric}": value for metric, value in means.items()}
            # Whether to save and when to give up is decided by this: by the same on every process.
            averages = processes.broadcast("evaluation", averages.copy)
            self.report.evaluation(done, averages)
        if self.writer is not None:
            text = self.writer(done, state, frozen)
            self.report.sample(done, text)
        if self.answers is not None:
            self.answers(done, state, frozen)
        return averages

    def measure(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        """Scores of tasks, and the cost of the one that decides which weights are the best."""
        if self.tasks is None:
            return {}
        with self.terminal.doing("measuring tasks"):
            scores = self.tasks(done, state, frozen)
        if scores is None:
            self.report.cut_short(done)
            return {}
        metrics = self.report.scores(done, scores)
        best = self.train.best
        return metrics | ({} if best is None else {self.train.watched: scores[best].cost})

    def judged(self, done: int, state: State, averages: dict[str, float]) -> State:
        """The state with its progress, where what decides that was measured."""
        if self.train.watched not in averages:
            return state
        progress = state.progress.judged(done, averages[self.train.watched])
        return state._replace(progress=progress)

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
