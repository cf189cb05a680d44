"""What is said of the learning rate of a run that is made longer or shorter."""

import pytest

from windlass.optim import Schedule
from windlass.optim.adamw import Optimizer
from windlass.training.length import fate


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
    told = fate(optimizer.rate, 100, after, done)
    end = float(optimizer.rate(after)(after - 1))
    assert told == (
        f"train.steps was 100 and is {after}: the learning rate {said}; "
        f"it ends at {end:.3g} at step {after}"
    )
