"""Answers to a few held-out grids at each evaluation, in a file beside the run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from windlass.columns import Picture
from windlass.data.load import evaluation_batches
from windlass.devices.axes import shard
from windlass.objectives import BaseObjective
from windlass.processes import hosts
from windlass.program.step import Frozen, State
from windlass.run_folder import answers, folder
from windlass.run_folder.answers import Answered, Answers
from windlass.telemetry.compiles import Program
from windlass.training.session import Session

MOST = 64  # rows that are answered, of which some are shown
SHOWN = 6
COLUMNS = ("tokens", "targets", "weight")


def picture(session: Session) -> Picture | None:
    """Picture of held-out rows; None: there are none, or they are no grid."""
    data, objective = session.run.data, session.run.objective
    if type(objective).predictions is BaseObjective.predictions:
        return None
    if not (data.has_blocks and data.holds_out("validation") and data.source is not None):
        return None
    return data.source.picture


class AnswerWriter:
    """Writer of answers by pass, with the averaged weights where a run has them."""

    def __init__(self, session: Session, folder_of_run: Path, drawn: Picture):
        self.session, self.file, self.picture = session, folder_of_run / folder.ANSWERS, drawn
        self.rows = session.prepared.split("validation")
        options = session.built.described.compiler_options
        self.function = Program(self._predictions, "predictions", compiler_options=options)

    def _predictions(self, weights: PyTree, frozen: PyTree, batch: dict[str, Array]) -> Any:
        model = self.session.built.model(weights, frozen)
        found = self.session.run.objective.predictions(model, batch)
        assert found is not None
        found |= {name: batch[name] for name in COLUMNS}
        # Whole on every process, the first of which writes.
        return {name: shard(x, " ".join("." * x.ndim))[:MOST] for name, x in found.items()}

    def __call__(self, done: int, state: State, frozen: Frozen) -> None:
        weights = state.weights if state.ema is None else state.ema
        arrays = self.session.programs.finish(weights, frozen.model, state.carry)
        batches, place = self.session.batches, self.session.programs.place
        batch = next(evaluation_batches(self.rows, batches.per_device * batches.shards, place))
        found = jax.tree.map(np.asarray, self.function(*arrays, batch))
        if hosts.is_first():
            answers.write(self.file, chosen(done, self.picture, found))


def chosen(step: int, drawn: Picture, found: dict[str, np.ndarray]) -> Answers:
    """A few rows, from the one that is solved soonest to one that is not."""
    counted = found["weight"].sum(axis=1) > 0  # the others are padding
    found = {name: x[counted] for name, x in found.items()}
    right = (found["answers"] == found["targets"][:, None]) | (found["weight"][:, None] == 0)
    exact = right.all(axis=2)
    soonest = np.where(exact.any(axis=1), exact.argmax(axis=1), exact.shape[1])
    order = np.argsort(soonest, kind="stable")
    some = order[np.linspace(0, len(order) - 1, min(SHOWN, len(order))).round().astype(int)]
    halt = found["halt"].astype(float).round(4)
    columns = [found[name] for name in (*COLUMNS, "answers")]
    rows = [Answered(*(x[i].tolist() for x in (*columns, halt))) for i in some]
    return Answers(step, drawn, exact.mean(axis=0).round(4).tolist(), len(exact), rows)
