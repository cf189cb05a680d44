"""Scores of public tasks as a run trains, and the results files of the harness in its folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

from windlass.config.reading import offer
from windlass.errors import UserError
from windlass.evaluation import harness
from windlass.evaluation.chat import ends
from windlass.evaluation.finished_run import context_length
from windlass.evaluation.generate import Generator
from windlass.evaluation.harness import Harness, Score
from windlass.evaluation.likelihood import Scorer
from windlass.hub.config import mapping
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.run import Run
from windlass.run_folder import folder as folders
from windlass.training.session import NO_TEXT, Session
from windlass.units import counted

BATCH = 8  # most prompts on a device: logits of them are live at the same time


def load(run: Run) -> Harness | None:
    """The tasks of a recipe with their data, or a refusal before anything is trained."""
    tasks = run.tasks
    if tasks is None:
        return None
    if hosts.count() > 1:
        raise UserError(
            f"tasks.names is {', '.join(tasks.names)}, and lm-evaluation-harness measures in one "
            f"process, where this run has {hosts.count()}; tasks=null leaves them out, and "
            f"`windlass evaluate RUN --tasks {','.join(tasks.names)}` measures its checkpoints"
        )
    loaded = Harness(tasks.names, limit=tasks.limit, shots=tasks.shots, folder=tasks.folder)
    _check_best(run.train.best, loaded)
    return loaded


def _check_best(best: str | None, loaded: Harness) -> None:
    known = {name for name, is_higher in loaded.metrics.items() if is_higher is not None}
    if best is not None and best not in known:
        raise UserError(f"train.best is {best}; {offer(best, sorted(known))}")


class TaskEvaluator:
    """Scores of the weights that count: the average, where a run keeps one.

    To be used with the mesh set. Programs are compiled once, whatever the step.
    """

    def __init__(self, session: Session, folder: Path, loaded: Harness, stops: Callable[[], bool]):
        vocabulary, tasks = session.prepared.vocabulary, session.run.tasks
        assert tasks is not None
        if vocabulary is None:
            raise UserError(
                f"tasks.names is {', '.join(tasks.names)}, and {NO_TEXT}; tasks=null leaves them "
                "out"
            )
        self.session, self.vocabulary, self.tasks = session, vocabulary, tasks
        self.chat = harness.uses_chat(session.run.data.format, vocabulary, tasks.chat)
        self._folder, self._harness, self._stops = folder / folders.TASKS, loaded, stops
        self._models: tuple[Scorer, Generator] | None = None

    @property
    def described(self) -> str:
        """Tasks in words, for the banner of a run."""
        tasks = self.tasks
        shots = [] if tasks.shots is None else [counted(tasks.shots, "few-shot example")]
        limit = [] if tasks.limit is None else [f"{counted(tasks.limit, 'example')} each"]
        template = ["with the chat template"] if self.chat else []
        return ", ".join([*tasks.names, *shots, *limit, *template])

    def __call__(self, done: int, state: State, frozen: Frozen) -> dict[str, Score] | None:
        """Scores by `task/metric`; None where a signal cut the measurement short."""
        if self._stops():  # before prompts are made of thousands of examples
            return None
        try:
            measured = self._harness(
                *self._renewed(state, frozen), chat=self.chat, stops=self._stops
            )
        except harness.CutShort:
            return None
        harness.write(measured.results, self._folder / folders.measured_at(done, _part(state)))
        return measured.flat

    def truncate(self, step: int) -> None:
        """Drop the results after a step: a run that goes on from there measures them again."""
        for place in self._folder.glob("step-*"):
            number = place.name.removeprefix("step-").partition("-")[0]
            if number.isdigit() and int(number) > step:
                shutil.rmtree(place)

    def _renewed(self, state: State, frozen: Frozen) -> tuple[Scorer, Generator]:
        session = self.session
        weights = state.weights if state.ema is None else state.ema
        arrays = session.programs.finish(weights, frozen.model, state.carry)
        model = session.built.model(*arrays)
        if self._models is None:
            batches = session.batches
            published = self._folder.parent / folders.MODEL / "config.json"
            about = mapping(published) if published.is_file() else None
            scorer = Scorer(
                model,
                longest=context_length(session.run, about),
                batch=batches.shards * min(BATCH, batches.per_device),
            )
            self._models = scorer, Generator(model, self.vocabulary, ends(self.vocabulary))
        for one in self._models:
            one.renew(model)
        return self._models


def _part(state: State) -> str:
    return "weights" if state.ema is None else "ema"
