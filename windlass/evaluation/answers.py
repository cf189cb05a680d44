"""Answers by row: what an objective predicts, votes over variants of a row, and a file of them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from windlass.errors import UserError
from windlass.files import writable, write
from windlass.objectives import BaseObjective

PLACES = 2  # answers that may be handed in: pass@1 and pass@2
SUFFIX = ".npz"


def make_predictions(
    model: Callable[..., Any], objective: BaseObjective
) -> Callable[..., dict[str, Array] | None]:
    """The objective's predictions for one batch, to be compiled; `model` is that of a step."""

    def predict(weights: PyTree, frozen: Any, batch: dict[str, Array]) -> dict[str, Array] | None:
        return objective.predictions(model(weights, frozen.model), batch)

    return predict


def predicts(objective: type[BaseObjective]) -> bool:
    """Return True if objectives of a kind have predictions by row."""
    return objective.predictions is not BaseObjective.predictions


class Ranked(NamedTuple):
    """The answers to each row that had most votes."""

    answers: Int[np.ndarray, "rows places length"]
    votes: Int[np.ndarray, "rows places"]  # 0 where a row had fewer different answers

    def passed(
        self, targets: Int[np.ndarray, "rows length"], weight: Float[np.ndarray, "rows length"]
    ) -> dict[str, float]:
        """pass@k: the share of rows that one of their first k answers is right for."""
        is_right = (self.answers == targets[:, None]) | (weight[:, None] == 0)
        is_right = is_right.all(axis=2) & (self.votes > 0)
        best = np.logical_or.accumulate(is_right, axis=1)
        return {f"pass@{k + 1}": float(best[:, k].mean()) for k in range(best.shape[1])}


class Ballot:
    """Votes for whole answers: the most votes win, and of as many the surest on average."""

    def __init__(self, rows: int):
        self._cast: list[dict[bytes, list[float]]] = [{} for _ in range(rows)]

    def cast(
        self, answers: Int[np.ndarray, "rows length"], halt: Float[np.ndarray, " rows"]
    ) -> None:
        """A vote for each row, by a probability that its answer is right."""
        for own, answer, sure in zip(self._cast, answers, halt.tolist(), strict=True):
            own.setdefault(answer.astype(np.int32).tobytes(), []).append(sure)

    def ranked(self, places: int = PLACES) -> Ranked:
        answers, votes = [], np.zeros((len(self._cast), places), np.int32)
        for row, own in enumerate(self._cast):
            order = sorted(own, key=lambda one: (-len(own[one]), -float(np.mean(own[one]))))
            votes[row, : len(order)] = [len(own[one]) for one in order[:places]]
            filled = [order[min(place, len(order) - 1)] for place in range(places)]
            answers.append([np.frombuffer(one, np.int32) for one in filled])
        return Ranked(np.array(answers, np.int32), votes)


def check_file(file: Path) -> None:
    """Refuse a name that arrays are not kept under, before anything is computed."""
    if file.suffix != SUFFIX:
        raise UserError(
            f"--save is {file}; answers are arrays in a file of NumPy's, which ends in {SUFFIX}"
        )
    if file.is_dir():
        raise UserError(f"--save is {file}, a folder; it names a file")


def save(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Compressed arrays by name, for `numpy.load`."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    with writable(file):
        write(file, content.getvalue())
