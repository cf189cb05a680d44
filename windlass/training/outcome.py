"""Outcome of a run: the losses of its last evaluation and its last steps."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.evaluation.verdict import training_loss, verdict
from windlass.program.step import State
from windlass.telemetry import metrics
from windlass.training.session import Session


def outcome(
    session: Session, state: State, latest: Mapping[str, float], records: Path, per_epoch: int
) -> Iterator[tuple[str, str]]:
    """The validation loss, the baseline to compare it with, and a verdict on generalization."""
    run, progress, done = session.run, state.progress, int(state.step)
    unit = run.objective.unit
    which = "" if state.ema is None else " with the average of the weights"
    where = "" if int(progress.best_step) == done else f" at step {progress.best_step}"
    measured = f"{latest[run.train.watched]:.4f} nats a {unit} on validation rows{which}"
    yield "loss", f"{measured}, at best {float(progress.best):.4f}{where}"
    entropy = session.prepared.unigram_entropy if unit == "token" else None
    if entropy is not None:
        yield "unigram", f"{entropy:.4f}, the entropy of the corpus's token frequencies"
    loss = latest.get("validation_cross_entropy", latest.get("validation_loss", math.nan))
    trained = training_loss(metrics.read(records), done, per_epoch)
    if trained is not None:
        names = ("validation", f"the last {trained.steps} training steps")
        yield "verdict", verdict(loss, trained.loss, names=names, unigram=entropy)
