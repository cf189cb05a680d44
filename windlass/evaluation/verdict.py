"""Generalisation gap: the loss on new rows against that on rows the model knows."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

CLOSE, FAR = 0.1, 0.2  # nats: nearer than this a model generalises, further it overfits
LAST = 0.1  # the share of all steps whose training loss is taken for that of the end


def verdict(
    loss: float, baseline: float, *, names: tuple[str, str], unigram: float | None = None
) -> str:
    """A line on a loss and the one it should be as low as, with the limits it is judged by.

    `names` say what both are of, as in `test` and `validation`; `unigram` is the entropy of token
    frequencies, where the loss is that of tokens.
    """
    new, old = names
    if unigram is not None and loss > unigram:
        return (
            f"worse than guessing: the {new} loss is {loss:.4f}, and who knows nothing but how "
            f"frequent each token is has {unigram:.4f}; more steps, or another "
            "optim.learning_rate may help"
        )
    gap = loss - baseline
    apart = f"the {new} loss is {abs(gap):.4f} {'above' if gap > 0 else 'below'} that of {old}"
    if abs(gap) < CLOSE:
        return f"generalises: {apart}, less than {CLOSE}"
    if gap > FAR:
        return (
            f"overfits: {apart}, more than {FAR}; fewer epochs, more documents or --weights best "
            "may help"
        )
    if gap > 0:
        return f"undecided: {apart}, between {CLOSE} and {FAR}"
    return f"undecided: {apart}, more than {CLOSE}; its rows seem to be easier"


class TrainingLoss(NamedTuple):
    """The loss at the end of training, and over how many steps."""

    loss: float
    steps: int


def training_loss(
    records: Iterable[Mapping[str, Any]], steps: int, per_epoch: int
) -> TrainingLoss | None:
    """Mean of the last reported losses; None where there is but one, which is chance.

    The last tenth of all steps, and no more than an epoch: an older loss is of another model.
    """
    last = max(1, min(per_epoch, round(LAST * steps)))
    losses = [
        record.get("cross_entropy", record["loss"])
        for record in records
        if record["step"] > steps - last and isinstance(record.get("loss"), int | float)
    ]
    return TrainingLoss(sum(losses) / len(losses), last) if len(losses) > 1 else None
