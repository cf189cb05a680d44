"""How many steps a run has, and what is said of its learning rate when it gets more or fewer."""

import pytest

from windlass.optim import Schedule
from windlass.optim.adamw import Optimizer
from windlass.program.length import Length, schedule_change
from windlass.run import Train


@pytest.mark.parametrize(
    ("schedule", "after", "done", "said"),
    [
        # Half a cosine at its middle is 0.5, at its quarter 0.854; at step 100 of 100 it is 0.
        (dict(), 200, 100, "was 2.47e-07 at step 100 and is 0.0005 at step 101, so it rises again"),
        (dict(), 200, 50, "was 0.000516 at step 50 and is 0.000854 at step 51, so it rises again"),
        (dict(), 75, 50, "was 0.000516 at step 50 and is 0.00025 at step 51"),
        # A plateau, then a fall over the last fifth.
        (dict(decay_share=0.2), 200, 50, "goes on at 0.001"),
        (
            dict(decay_share=0.2, shape="linear"),
            200,
            100,
            "was 5e-05 at step 100 and is 0.001 at step 101, so it rises again",
        ),
        (dict(shape="constant"), 200, 100, "goes on at 0.001"),
        # A rise that was a tenth of the run is to be made again in part.
        (
            dict(warmup_share=0.5, shape="constant"),
            200,
            50,
            "was 0.00098 at step 50 and is 0.0005 at step 51",
        ),
    ],
)
def test_the_learning_rate_before_and_after_is_said(schedule, after, done, said):
    optimizer = Optimizer(learning_rate=1e-3, schedule=Schedule(**schedule))
    told = schedule_change(optimizer.rate, 100, after, done)
    end = float(optimizer.rate(after)(after - 1))
    assert told == (
        f"the run had 100 steps and has {after}: the learning rate {said}; "
        f"it ends at {end:.3g} at step {after}"
    )


@pytest.mark.parametrize(
    ("epochs", "per_epoch", "steps", "said"),
    [
        (3.0, 25, 75, "75 steps, 3 epochs of 25"),
        (1.0, 7, 7, "7 steps, 1 epoch of 7"),
        (0.1, 30, 3, "3 steps, 0.1 epochs of 30"),
        (2.5, 5, 12, "12 steps, 2.5 epochs of 5"),
        (0.01, 30, 1, "1 step, 0.01 epochs of 30"),
    ],
)
def test_epochs_are_full_batches_and_at_least_a_step(epochs, per_epoch, steps, said):
    length = Length.of(Train(epochs=epochs, batch=1), per_epoch)
    assert length.steps == steps
    assert str(length) == said


@pytest.mark.parametrize("per_epoch", [1, 3, 7, 25, 9_973])
def test_the_epochs_that_are_offered_for_some_steps_are_those_steps(per_epoch):
    asked = Length.of(Train(epochs=1.0, batch=1), per_epoch)
    for steps in (1, 2, per_epoch, per_epoch + 1, 10 * per_epoch - 1):
        written = float(asked.key(steps).removeprefix("train.epochs="))
        assert Length.of(Train(epochs=written, batch=1), per_epoch).steps == steps


def test_of_a_number_of_steps_nothing_is_counted():
    length = Length.of(Train(steps=40, batch=1), 25)
    assert (length.steps, str(length), length.key(80)) == (40, "40 steps", "train.steps=80")
