"""Evaluations between steps, and what they decide: which weights are the best, and when to stop."""

from collections.abc import Callable
from pathlib import Path

from windlass.evaluation.harness import Harness
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.run_folder import folder as folders
from windlass.telemetry.console import ConsoleReport
from windlass.training import answers
from windlass.training.answers import AnswerWriter
from windlass.training.report import RunReport
from windlass.training.samples import Writer
from windlass.training.session import Evaluator, Session
from windlass.training.tasks import TaskEvaluator


class Evaluations:
    """Losses on held-out rows with samples and answers, and scores of tasks, as a recipe has them.

    To be used with the mesh set. `stops` says that a signal came, for which tasks are cut short.
    """

    def __init__(
        self,
        session: Session,
        folder: Path,
        report: RunReport,
        terminal: ConsoleReport,
        benchmarks: Harness | None,
        stops: Callable[[], bool],
    ):
        run = session.run
        self._folder, self._report, self._terminal = folder, report, terminal
        self._train = run.train
        self._evaluator: Evaluator | None = None
        if run.data.holds_out("validation"):
            self._evaluator = Evaluator(session, "validation")
        self._tasks: TaskEvaluator | None = None
        if benchmarks is not None:
            self._tasks = TaskEvaluator(session, folder, benchmarks, stops)
        self._writer = Writer(session, folder) if run.train.sample else None
        drawn = answers.picture(session)
        self._answers = None if drawn is None else AnswerWriter(session, folder, drawn)

    def banner(self) -> None:
        """Print which tasks are measured."""
        if self._tasks is not None:
            self._terminal.fact("tasks", self._tasks.described)

    def truncate(self, step: int) -> None:
        """Drop samples and results after a step: a run that goes on from there makes them again."""
        if self._writer is not None:
            self._writer.truncate(step)
        if self._tasks is not None:
            self._tasks.truncate(step)

    def evaluate(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        """Averages on held-out rows; samples and answers are written beside them."""
        with self._terminal.doing("evaluating"):
            averages = self._averages(done, state, frozen)
            if self._writer is not None:
                text = self._writer(done, state, frozen)
                self._report.sample(done, text)
            if self._answers is not None:
                self._answers(done, state, frozen)
        return averages

    def _averages(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        averages = {}
        parts = {"validation": state.weights, "validation_ema": state.ema}
        for name, weights in parts.items():
            if weights is not None:
                means = self._evaluator(weights, frozen, state.carry, state.step)
                averages |= {f"{name}_{metric}": value for metric, value in means.items()}
        # Whether to save and when to give up is decided by this: by the same on every process.
        averages = hosts.broadcast("evaluation", averages.copy)
        self._report.evaluation(done, averages)
        return averages

    def measure(self, done: int, state: State, frozen: Frozen) -> dict[str, float]:
        """Scores of tasks, and the cost of the one that decides which weights are the best."""
        if self._tasks is None:
            return {}
        with self._terminal.doing("measuring tasks"):
            scores = self._tasks(done, state, frozen)
        if scores is None:
            self._report.cut_short(done)
            return {}
        metrics = self._report.scores(done, scores)
        best = self._train.best
        return metrics | ({} if best is None else {self._train.watched: scores[best].cost})

    def judged(self, done: int, state: State, averages: dict[str, float]) -> State:
        """The state with its progress, where what decides that was measured."""
        if self._train.watched not in averages:
            return state
        progress = state.progress.judged(done, averages[self._train.watched])
        return state._replace(progress=progress)

    def rejudged(self, state: State) -> State:
        """The state without a best that another metric than that of this recipe found."""
        before = hosts.broadcast("best by", lambda: folders.best_by(self._folder))
        if before == self._train.best:
            return state
        names = [one or "the loss on held-out data" for one in (before, self._train.best)]
        self._terminal.note(f"the best so far was by {names[0]}, and is now by {names[1]}")
        return state._replace(progress=state.progress.unjudged())

    def gives_up(self, state: State) -> bool:
        """True where evaluations in a row found nothing better, as many as `train.patience`."""
        patience = self._train.patience
        return patience is not None and int(state.progress.since) >= patience
