"""The verdict of two losses, by limits that the line itself says."""

import pytest

from windlass.evaluation.verdict import TrainingLoss, training_loss, verdict

CLOSE, BETWEEN, FAR = "less than 0.1", "between 0.1 and 0.2", "more than 0.2"


@pytest.mark.parametrize(
    ("test", "line"),
    [
        (1.09, "generalises: the test loss is 0.0900 above that of validation, less than 0.1"),
        (0.91, "generalises: the test loss is 0.0900 below that of validation, less than 0.1"),
        (
            1.15,
            "undecided: the test loss is 0.1500 above that of validation, between 0.1 and 0.2",
        ),
        (
            1.21,
            "overfits: the test loss is 0.2100 above that of validation, more than 0.2; "
            "fewer epochs, more documents or --weights best may help",
        ),
        (
            0.7,
            "undecided: the test loss is 0.3000 below that of validation, more than 0.1; "
            "its rows seem to be easier",
        ),
    ],
)
def test_a_line_says_the_verdict_the_gap_and_the_limit(test, line):
    assert verdict(test, 1.0, names=("test", "validation")) == line


def test_a_loss_above_the_entropy_of_frequencies_is_called_worse_than_guessing():
    names = ("validation", "the last 10 training steps")
    assert verdict(6.53, 6.55, names=names, unigram=3.5) == (
        "worse than guessing: the validation loss is 6.5300, and who knows nothing but how "
        "frequent each token is has 3.5000; more steps, or another optim.learning_rate may help"
    )
    for loss, unigram in ((6.53, None), (3.5, 3.5), (2.0, 3.5)):
        assert verdict(loss, loss, names=names, unigram=unigram).startswith("generalises: ")


@pytest.mark.parametrize(
    ("test", "word"), [(0.2499, "generalises"), (0.25, "undecided"), (0.375, "overfits")]
)
def test_a_gap_of_exactly_a_tenth_is_no_longer_close(test, word, monkeypatch):
    # Limits that binary fractions have, so that a gap can be exactly one of them.
    monkeypatch.setattr("windlass.evaluation.verdict.CLOSE", 0.125)
    monkeypatch.setattr("windlass.evaluation.verdict.FAR", 0.2)
    assert verdict(test, 0.125, names=("test", "validation")).startswith(word)


def test_the_training_loss_is_that_of_the_last_tenth_of_the_steps_and_of_an_epoch_at_most():
    losses = [{"step": n, "loss": 9.0, "cross_entropy": float(n)} for n in range(0, 101, 2)]
    records = [*losses, {"step": 100, "validation_loss": 7.0}]
    assert training_loss(records, 100, 1000) == TrainingLoss(96.0, 10)  # 92, 94, 96, 98, 100
    assert training_loss(records, 100, 4) == TrainingLoss(99.0, 4)
    assert training_loss(records, 100, 1) is None  # one step, told once


def test_a_loss_that_was_not_finite_is_left_out():
    records = [{"step": 99, "loss": "nan"}, *({"step": n, "loss": 2.0} for n in (97, 98, 100))]
    assert training_loss(records, 100, 1000) == TrainingLoss(2.0, 10)
