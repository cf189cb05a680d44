"""The loop: restore or initialise; then step, report, evaluate, save."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jaxtyping import Array
from rich.console import Console

from windlass.analysis.flops import step_flops
from windlass.checkpoint.store import Store, folder_of, newest_step, steps_in
from windlass.config import AnyRecipe, Due, tree
from windlass.data.load import Loader
from windlass.errors import UserError
from windlass.planning import planner
from windlass.processes import hosts as processes
from windlass.processes.clock import Clock
from windlass.processes.clusters import Hosts, find
from windlass.processes.peers import Peers, check_devices, together
from windlass.processes.signals import Signals
from windlass.program.described import Described, Divided
from windlass.program.length import fate
from windlass.program.step import Frozen, State
from windlass.run_folder import folder as folders
from windlass.run_folder import plan_file, runs
from windlass.run_folder.plan_file import Forecast
from windlass.run_folder.relocation import moved
from windlass.starting import adapter, origin
from windlass.starting.describe import describe
from windlass.telemetry import about
from windlass.telemetry.about import About
from windlass.telemetry.compiles import Recompiled, Watch
from windlass.telemetry.console import Report
from windlass.telemetry.memory import device_peak, is_exhausted, memory, program_parts
from windlass.telemetry.metrics import Meter, Metrics
from windlass.training import reference
from windlass.training.banner import banner
from windlass.training.outcome import outcome
from windlass.training.samples import Writer
from windlass.training.session import Evaluator, Session, open_session
from windlass.units import duration

BETWEEN_STEPS = 30.0  # seconds without a line that are no silence: `telemetry.every` says how many


class Trained(NamedTuple):
    """How a run ended."""

    folder: Path
    step: int
    is_finished: bool
    metrics: dict[str, float]  # of the last evaluation, and before it of the last step
    stopped_by: int | None  # the number of the signal


def train(
    recipe: AnyRecipe,
    overrides: Sequence[str] = (),
    *,
    hosts: Hosts | None = None,
    signals: Signals | None = None,
    report: Report | None = None,
    plans: bool = False,
) -> Trained:
    """Train a recipe to its last step, from wherever an earlier call of the same left it.

    Where several processes make this call they train one run: `hosts` is the place of this one, or
    it is found as `windlass train` finds it. One that `plans` notes what it will take, and explains
    it where memory runs out. JAX must not have touched a device before. Unlike a
    command, a call has no parent: SIGTERM still stops all processes after the same step, but when
    another process is lost, JAX ends this one, in its own words; and what another process refuses
    is printed here before this one ends, too.
    """
    given: dict[str, Any] = {"hosts": hosts or find(None, os.environ), "plans": plans}
    if signals is None:
        with Signals().listening() as signals:
            return train(recipe, overrides, signals=signals, report=report, **given)
    hosts = given["hosts"]
    if report is None:
        # The run is told once: by the first process.
        is_first = hosts is None or hosts.process == 0
        with Report(None if is_first else Console(quiet=True)) as report:
            return train(recipe, overrides, signals=signals, report=report, **given)
    with together(hosts, signals, newest_step) as peers:
        return _train(recipe, overrides, signals, report, peers, plans)


def _train(
    recipe: AnyRecipe,
    overrides: Sequence[str],
    signals: Signals,
    report: Report,
    peers: Peers | None,
    plans: bool,
) -> Trained:
    with signals.phase("reading the recipe"):
        described = describe(recipe, overrides)
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
    strict, kept = described.run.train.strict, described.kept
    with (
        folders.roomy(folder),
        folders.locked(folder),
        described.scope(),
        Watch(report, strict=strict, kept=kept, former=former) as watch,
    ):
        folders.check_shared(folder)
        is_new = processes.found("is new", lambda: not steps_in(folder_of(folder)))
        if described.run.start is not None and is_new:
            with signals.phase("looking for the weights to start from"):
                origin.check(described.run.start)
        with signals.phase("preparing the data"):
            session = open_session(described, report.console)
        return Loop(session, folder, signals, report, watch, plans).run()


def _divided(described: Described) -> Described:
    """With what `train.microbatch: auto` stands for; the first process decides for all."""
    chosen = processes.found("microbatch", lambda: planner.divide(described)._asdict())
    return dataclasses.replace(described, divided=Divided(**chosen))


class Loop:
    """One run, from where it stands to its end."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        signals: Signals,
        report: Report,
        watch: Watch,
        plans: bool = False,
    ):
        run = session.run
        self.watch, self.plans = watch, plans
        self.forecast = Forecast(folder / folders.PLAN)
        self.session, self.folder, self.signals, self.report = session, folder, signals, report
        self.train, self.steps = run.train, session.length.steps
        self.abstract = session.programs.abstract_state()
        self.loader = Loader(
            session.prepared.split("train"),
            session.batches.rows,
            run.train.seed,
            run.data.shuffle,
            workers=run.data.workers,
            prefetch=run.data.prefetch,
        )
        self.records = Metrics(folder / folders.METRICS)
        self.about = About(folder / folders.ABOUT)
        self.store = Store(
            folder, say=report.warning, keep=run.checkpoint.keep, best=run.train.watched
        )
        self.evaluator: Evaluator | None = None
        if run.data.validation:
            self.evaluator = Evaluator(session, "validation")
        self.writer = Writer(session, folder) if run.train.sample else None

    def run(self) -> Trained:
        self.report.banner(banner(self.session, self.loader, self.folder))
        try:
            with (
                self.signals.phase("restoring"),
                self.report.doing("restoring"),
                self.explains_exhaustion("while the weights were placed on the device"),
            ):
                state, frozen = self.restore_or_initialise()
            if self.is_finished(state):
                return self.already_finished(state)
            return self.train_from(int(state.step), state, frozen)
        finally:
            self.store.close()

    def train_from(self, first: int, state: State, frozen: Frozen) -> Trained:
        # Not before the checkpoint was found to be of this run: a refusal changes nothing.
        if processes.is_first():
            folders.store(self.folder, self.session.run)
            if (vocabulary := self.session.prepared.vocabulary) is not None:
                vocabulary.save(self.folder / folders.TOKENIZER)
        self.records.truncate(first)
        self.about.begin(step=first, steps=self.steps, **self.session.built.described.facts)
        if self.writer is not None:
            self.writer.truncate(first)
        self.watch.open(self.folder / folders.COMPILES, first)
        if self.plans:
            with self.signals.phase("planning"), self.report.doing("planning"):
                self.foresee()
        with (
            self.signals.phase("asking the first weights"),
            self.explains_exhaustion("while the first weights were asked"),
        ):
            reference.ensure(self.session, state, frozen, self.folder, self.report.console)
        processes.barrier("compiling the step")
        with (
            self.signals.phase("compiling the step"),
            self.explains_exhaustion("while the step was compiled"),
        ):
            step = self.compile()
        self.report.fact("compiled", self.watch.summary())
        if first == 0:
            self.store.save(0, state, self.session.identity)
        with self.signals.waits():
            with (
                self.report.doing("training", patience=BETWEEN_STEPS),
                self.explains_exhaustion(None),
            ):
                state, latest = self.go(step, state, frozen, first)
            with self.report.doing("saving"):
                self.store.wait()
        return self.end(state, latest)

    def go(
        self, step: Callable, state: State, frozen: Frozen, first: int
    ) -> tuple[State, dict[str, float]]:
        """Step, report, evaluate, save, until the last step, a signal or the end of patience."""
        run, latest = self.session.run, {}
        meter = self.meter = self.make_meter()
        per_epoch = self.loader.batches_per_epoch
        intervals = (self.train.evaluate_every, run.checkpoint.every, run.telemetry.every)
        clock = Clock(*intervals)
        evaluation_due, save_due, report_due = (Due(x, per_epoch, clock) for x in intervals)
        self.report.start(self.steps, first)
        batches = self.loader.iterate(first, self.session.programs.place)
        for done in range(first + 1, self.steps + 1):
            with self.saves_if_refused(state):
                state, metrics = step(state, frozen, meter.next(batches))
            meter.step(metrics["loss"])
            self.watch.took(done)
            clock.step(done)
            ends = done == self.steps or self.signals.ends(done)
            evaluates = done == self.steps or evaluation_due(done)
            saves = ends or save_due(done)
            if evaluates or saves or done == first + 1 or report_due(done):
                latest = self.tell(done, state, metrics, meter)
            if done == self.steps:
                state = self.session.programs.finish(state, frozen)
            if evaluates:
                with meter.paused(), self.report.doing("evaluating"), self.saves_if_refused(state):
                    state, found = self.evaluate(done, state, frozen)
                    latest |= found
                saves = saves or int(state.progress.best_step) == done
                if done < self.steps and self.is_finished(state):
                    state = self.session.programs.finish(state, frozen)
                    saves = ends = True
            if saves:
                with meter.paused(), self.report.doing("saving"):
                    if ends:
                        processes.barrier("the last save")
                    self.store.save(done, state, self.session.identity, latest)
                    self.measure()
            if ends:
                break
        return state, latest

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
        """Memory that runs out here is told in the terms of the model, and what would fit."""
        try:
            yield
        except JaxRuntimeError as error:
            if not self.plans or not is_exhausted(error):
                raise
            told = f"after step {self.watch.step}" if self.watch.has_begun else "in the first step"
            described, folder = self.session.built.described, self.folder
            self.store.wait()  # what is being saved is saved, and is what the run goes on from
            self.report.close()
            with self.report.doing("looking for what would fit"):
                text = planner.explain(described, str(error), when or told, folder)
            raise UserError(text) from error

    def foresee(self) -> None:
        described, rows = self.session.built.described, len(self.loader.rows)
        chose = described.facts["chose"]
        why = self.forecast.begin(described.run, chose, lambda: planner.plan(described, rows))
        if why is not None:
            self.report.note(why)
        if (told := plan_file.line({**self.forecast.whole, "measured": {}})) is not None:
            self.report.fact("plan", told)

    def measure(self) -> None:
        """Note beside the plan what the run takes, as far as it is known by now."""
        if not self.plans:
            return
        meter = self.meter
        self.forecast.stepped(
            meter.steps,
            device_peak_bytes=device_peak(self.session.built.described.devices),
            step_seconds=meter.median,
            tokens_per_second=meter.tokens_per_second,
        )

    def restore_or_initialise(self) -> tuple[State, Frozen]:
        abstract, frozen = self.abstract
        restored = self.store.restore(abstract, self.session.identity)
        if restored is None:
            state, frozen = self.session.programs.init(self.taken())
            if processes.is_first():
                origin.keep(self.session.run, self.folder)
            if jax.tree.leaves(frozen):
                self.store.save_frozen(frozen, self.session.identity)
            return state, frozen
        if jax.tree.leaves(frozen):
            frozen = self.store.restore_frozen(frozen, self.session.identity)
        if restored.step > self.steps:
            length = self.session.length
            raise UserError(
                f"{length.asked}, and the run in {self.folder} has done {restored.step}; "
                f"{length.key(restored.step)} leaves it as it is, more goes on, "
                "and run.dir starts another run"
            )
        if not self.is_finished(restored.state):
            where = f"step {restored.step} of {self.steps} in {self.folder}"
            self.report.note(f"going on from {where}")
            self.note_another_place()
            self.note_another_length(restored.step)
        return restored.state, frozen

    def taken(self) -> dict[str, Array]:
        """The weights that this run starts from, where it starts from any."""
        session, start = self.session, self.session.run.start
        arrays, facts = adapter.take(session.built, self.report.warning)
        if start is not None:
            vocabulary = str(session.identity["tokenizer"])
            found = origin.take(start, session.built, vocabulary, self.report.warning)
            arrays, facts = found.arrays | arrays, found.facts + facts
        self.report.banner(facts)
        return arrays

    def note_another_place(self) -> None:
        starts = about.read(self.about.path) if processes.is_first() else []
        if starts:
            here = self.session.built.described.facts["chose"]
            told = moved(starts[-1]["chose"], here)
            if told is not None:
                self.report.note(told)

    def note_another_length(self, done: int) -> None:
        before = runs.steps_of(self.folder)
        if done and before is not None and before != self.steps:
            self.report.note(fate(self.session.run.optim.rate, before, self.steps, done))

    def is_finished(self, state: State) -> bool:
        return self.gives_up(state) or int(state.step) >= self.steps

    def gives_up(self, state: State) -> bool:
        patience = self.train.patience
        return patience is not None and int(state.progress.since) >= patience

    def compile(self) -> Callable:
        """The step for the shapes it will meet, before the first batch is there."""
        step = self.session.programs.step()
        program = step.prepare(*self.abstract, self.session.programs.abstract_batch())
        if self.plans:
            (device, *_) = self.session.built.described.devices
            parts = program_parts(program, device.platform)
            whole = parts and sum(parts.values())
            self.forecast.measured(compiler_bytes=whole, compiler_parts_bytes=parts)
        return step

    def make_meter(self) -> Meter:
        session, rows, described = self.session, self.loader.rows, self.session.built.described
        peak = described.chip and described.chip.peak.get(described.compute)
        flops = None if peak is None else step_flops(session.programs, *self.abstract)
        return Meter(
            rows_per_step=session.batches.rows,
            tokens_per_step=_times(session.batches.rows, rows.tokens_per_row),
            read_per_step=_times(session.batches.rows, rows.targets_per_row),
            flops_per_step=flops,
            peak_flops=peak and peak * len(described.devices),
        )

    def tell(
        self, done: int, state: State, metrics: dict[str, Array], meter: Meter
    ) -> dict[str, float]:
        # Not all as floats: a hash is written as the whole number that it is.
        found = {name: value.item() for name, value in metrics.items()}
        self.check_finite(state)
        found["learning_rate"] = float(self.session.run.optim.rate(self.steps)(done - 1))
        if (tokens := meter.tokens(done)) is not None:
            found["tokens"] = tokens
        found |= meter.read() | memory(self.session.built.described.devices)
        self.records.write(done, found)
        self.report.step(done, found)
        self.watch.flush()
        return found

    def check_finite(self, state: State) -> None:
        progress = state.progress
        if int(progress.not_finite) <= self.train.allowed:
            return
        bad = int(state.step)
        rows = ", ".join(str(row) for row in self.loader.row_numbers(bad - 1))
        saved = self.store.steps()
        told = self.records.last("gradient_norm")
        norm = (
            f" (gradient_norm {told['gradient_norm']:.2g} at step {told['step']})" if told else ""
        )
        others = int(progress.not_finite) - 1
        more = f", as were the {others} before it" if others else ""
        narrow = (
            "The loss scale has fallen to its floor, so that float16 is too narrow for this model: "
            "bfloat16 or float32 may do. "
        )
        raise UserError(
            f"loss or gradient is not finite at step {bad}{norm}{more}; "
            f"its rows are {rows}. Nothing was saved after step {saved[-1] if saved else 0}. "
            f"{'' if state.loss_scale is None else narrow}"
            "A lower optim.learning_rate, a longer warm-up or a smaller optim.clip_norm may help; "
            "`windlass data` shows the rows; train.nonfinite=skip goes on without such steps"
        )

    def evaluate(self, done: int, state: State, frozen: Frozen) -> tuple[State, dict[str, float]]:
        found = {}
        if self.evaluator is not None:
            parts = {"validation": state.weights, "validation_ema": state.ema}
            for name, weights in parts.items():
                if weights is not None:
                    means = self.evaluator(weights, frozen, state.carry, state.step)
                    found |= {f"{name}_{metric}": value for metric, value in means.items()}
            # Whether to save and when to give up is decided by this: by the same on every process.
            found = processes.found("evaluation", found.copy)
            progress = state.progress.judged(done, found[self.train.watched])
            state = state._replace(progress=progress)
            self.records.write(done, found)
            self.report.evaluation(done, found)
        if self.writer is not None:
            text = self.writer(done, state, frozen)
            self.records.text(done, "sample", text)
            self.report.sample(text)
        return state, found

    def already_finished(self, state: State) -> Trained:
        done = int(state.step)
        how, more = "", []
        if done >= self.steps:
            more.append(self.session.length.key(2 * self.steps))
        if self.gives_up(state):
            how = f", {self.why_early(state)}"
            more.append(f"train.patience={2 * state.progress.since}")
        self.report.note(
            f"this run is finished: step {done} of {self.steps} in {self.folder}{how}; "
            f"{' '.join(more)} would go on"
        )
        return Trained(self.folder, done, True, self.records.last() or {}, None)

    def why_early(self, state: State) -> str:
        so_far = state.progress
        since = "1 evaluation" if so_far.since == 1 else f"{so_far.since} evaluations"
        return f"no better in {since} than {float(so_far.best):.4f} at step {so_far.best_step}"

    def end(self, state: State, latest: dict[str, float]) -> Trained:
        done, stop = int(state.step), self.signals.stop or 0
        # One that is heard in the last step stops nobody, and is known to one process alone.
        stop = max(map(int, processes.each("stopped by", str(int(stop)))))
        is_finished = self.is_finished(state)
        self.about.end(at=done, is_finished=is_finished)
        if processes.is_first():
            self.report.end(self.summary(state, latest, is_finished))
        return Trained(self.folder, done, is_finished, latest, stop or None)

    def summary(
        self, state: State, latest: dict[str, float], is_finished: bool
    ) -> list[tuple[str, str]]:
        """What came of the run, a fact in a line."""
        done = int(state.step)
        summary = [("run", str(self.folder)), *self.spent(done)]
        if self.train.watched in latest:
            records, per_epoch = self.folder / folders.METRICS, self.loader.batches_per_epoch
            summary += outcome(self.session, state, latest, records, per_epoch)
        if state.loss_scale is not None:
            scale, overflows = float(state.loss_scale.scale), int(state.loss_scale.overflows)
            summary.append(("loss scale", f"{scale:g}, after {overflows} overflows"))
        if skipped := int(state.progress.skipped):
            summary.append(("skipped", f"{skipped} steps that were not finite"))
        if is_finished and done < self.steps:
            why = self.why_early(state)
            summary.append(("stopped", f"early at step {done} of {self.steps}: {why}"))
        summary.append(("compiled", self.watch.summary()))
        if (planned := plan_file.line(self.forecast.whole)) is not None:
            summary.append(("plan", planned))
        if is_finished:
            how = f'windlass generate {self.folder} "Once upon a time"'
            vocabulary = self.session.prepared.vocabulary
            if vocabulary is None:
                how = f"windlass evaluate {self.folder}"
            elif self.session.run.data.format.speaks and vocabulary.template is not None:
                how = f"windlass chat {self.folder}"
            summary.append(("next", how))
            summary.append(("next", f"windlass export {self.folder} --to FOLDER"))
        else:
            summary.append(("stopped", f"at step {done} of {self.steps}, saved"))
            summary.append(("next", "the same command again goes on from there"))
        return summary

    def spent(self, done: int) -> Iterator[tuple[str, str]]:
        """What the run took, in time and in tokens."""
        steps, seconds, epoch = self.meter.steps, self.meter.seconds, self.loader.batches_per_epoch
        whole = f"{duration(self.report.seconds)}, {duration(seconds)} of it in {steps} steps"
        if steps:
            whole += f"; an epoch takes {duration(seconds / steps * epoch)}"
        yield "time", whole
        rows, tokens = self.session.batches.rows * done, self.meter.tokens(done)
        what, count = ("rows", rows) if tokens is None else ("tokens", tokens)
        yield what, f"{count:,} trained on, in {done / epoch:.2f} epochs"


def _times(rows: int, each: float | None) -> float | None:
    return None if each is None else rows * each
