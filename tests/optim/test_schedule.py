"""Every schedule of the systems this package must reproduce, and the corners of theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from windlass.optim import Schedule


def expected(step, total, warmup, *, start=0.0, floor=0.0, constant=False) -> float:
    """The textbook: a straight rise, then half a cosine."""
    if step < warmup:
        return start + (1 - start) * step / max(1, warmup)
    share = (step - warmup) / (total - warmup)
    return 1.0 if constant else floor + (1 - floor) * (1 + np.cos(np.pi * share)) / 2


@pytest.mark.parametrize(
    ("schedule", "total", "warmup", "rest"),
    [
        (Schedule(warmup_share=0.03), 1000, 30, {}),
        (Schedule(warmup_share=0.03), 1010, 31, {}),
        (Schedule(warmup_share=0.07), 100, 7, {}),
        (Schedule(warmup_steps=100, start=0.1, floor=0.1), 700, 100, dict(start=0.1, floor=0.1)),
        (
            Schedule(warmup_steps=100, start=0.1, shape="constant"),
            700,
            100,
            dict(start=0.1, constant=True),
        ),
        (Schedule(warmup_steps=100, floor=0.1), 700, 100, dict(floor=0.1)),
        (Schedule(warmup_steps=500, warmup_share=0.05), 400, 20, {}),
        (Schedule(warmup_steps=500, warmup_share=0.05), 20_000, 500, {}),
        (Schedule(warmup_steps=0, floor=0.1), 50, 0, dict(floor=0.1)),
        (Schedule(warmup_steps=20, floor=0.1), 50, 20, dict(floor=0.1)),
        (Schedule(warmup_steps=20, floor=1.0), 50, 20, dict(floor=1.0)),
        (Schedule(warmup_steps=2000), 100_000, 2000, {}),
    ],
)
def test_a_rise_and_half_a_cosine_are_those_of_the_textbook(schedule, total, warmup, rest):
    assert schedule.warmup(total) == warmup
    share = jax.jit(schedule.over(total))
    corners = {0, 1, warmup - 1, warmup, warmup + 1, (warmup + total) // 2, total - 1, total}
    for step in corners - {-1}:
        found, wanted = share(jnp.int32(step)), expected(step, total, warmup, **rest)
        assert abs(found - wanted) < 2e-6, step


def test_a_plateau_lasts_until_the_last_part_of_the_run_falls():
    share = Schedule(warmup_steps=10, shape="linear", decay_share=0.2, floor=0.5).over(110)
    found = [float(share(jnp.int32(step))) for step in (5, 10, 60, 90, 100, 110, 120)]
    assert found == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.5])


@pytest.mark.parametrize("total", [10, 4, 1])
def test_a_run_that_ends_with_its_rise_or_before_it_only_rises(total):
    share = Schedule(warmup_steps=10).over(total)
    found = [float(share(jnp.int32(step))) for step in range(total)]
    assert found == pytest.approx([step / 10 for step in range(total)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("warmup_share", 1.5, "warmup_share is 1.5; it is a share, 0 to 1"),
        ("start", -0.1, "start is -0.1; it is a share, 0 to 1"),
        ("decay_share", 2.0, "decay_share is 2.0; it is a share, 0 to 1"),
        ("floor", 10.0, "floor is 10.0; it is a share, 0 to 1"),
        ("warmup_steps", -1, "warmup_steps is -1; it is a count, 0 or more"),
    ],
)
def test_a_share_that_is_none_is_refused(field, value, message):
    with pytest.raises(ValueError) as error:
        Schedule(**{field: value})
    assert str(error.value) == message
