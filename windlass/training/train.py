"""A call that trains a recipe: what it describes, where it runs and who is told of it."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from windlass.checkpoint.store import folder_of, newest_step, steps_in
from windlass.config import AnyRecipe, tree
from windlass.devices.preallocation import preallocate
from windlass.errors import UserError
from windlass.evaluation.harness import Harness
from windlass.planning import planner
from windlass.processes import hosts as processes
from windlass.processes.clusters import Hosts, find
from windlass.processes.peers import Peers, check_devices, together
from windlass.processes.signals import Signals
from windlass.program.described import Described, Divided
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.starting import frozen_models, origin
from windlass.starting.describe import describe
from windlass.telemetry import compile_debug, trackers
from windlass.telemetry.compile_debug import CompileDebug
from windlass.telemetry.compiles import Watch
from windlass.telemetry.console import ConsoleReport
from windlass.telemetry.phases import Phases
from windlass.telemetry.trackers import Trackers
from windlass.terminal import Terminal
from windlass.training import tasks
from windlass.training.loop import Loop, Trained
from windlass.training.session import open_session


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
    preallocate(described.devices)
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
