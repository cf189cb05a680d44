"""The throughput alarm: what is steady, and what one stall is."""

import pytest

from windlass.telemetry import Alarm
from windlass.telemetry.alarm import CAUSES, RECENT, Expected, ThroughputAlarm
from windlass.telemetry.metrics import CHECKPOINT, DATA, Reading

PLANNED = Expected.of(Alarm(), 1000, 1.0)  # 1000 tokens in a second
QUICK, SLOW = Reading(1, 1.5, {}), Reading(1, 2.5, {})


def warnings(*readings: Reading, expected: Expected | None = PLANNED) -> list[str]:
    """The warnings of a run with these readings, after that of its first step."""
    alarm = ThroughputAlarm(expected, 1000)
    said = [alarm.read(one) for one in (SLOW, *readings)]
    return [text for text in said if text is not None]


def test_half_the_speed_of_the_plan_is_enough_and_less_is_not():
    assert warnings(*[QUICK] * 20) == []
    assert warnings(*[SLOW] * (RECENT - 1)) == []
    (said,) = warnings(*[SLOW] * 20)
    assert said == (
        "throughput is 400 tok/s over the last 5 steps, below half the speed of the plan "
        "(1.0k tok/s), and the steps themselves are slow (waiting for data 0%, saving checkpoints "
        "0%, compiling programs again 0%, logging 0%): another program may use the device; "
        "profile.steps shows the operations that take the time"
    )


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_most_of_the_missing_time_is_named(cause):
    (said,) = warnings(*[Reading(1, 4.0, {cause: 3.0, DATA: 3.0 if cause == DATA else 0.5})] * 9)
    assert f": 75% of the time is {CAUSES[cause]}; " in said


def test_a_cause_of_less_is_not_blamed():
    (said,) = warnings(*[Reading(1, 10.0, {DATA: 2.0})] * 9)
    assert "the steps themselves are slow (waiting for data 20%, " in said


def test_one_stall_is_no_alarm_however_long_it_is():
    for lost in ({}, {DATA: 100.0}, {CHECKPOINT: 100.0}):
        assert warnings(*[QUICK] * 7, Reading(1, 101.5, lost), *[QUICK] * 7) == []


def test_stalls_count_over_the_time_from_one_to_the_next():
    often = [*[QUICK] * 3, Reading(1, 11.5, {CHECKPOINT: 10.0})]
    (said,) = warnings(*often * 5)
    assert "of the time is saving checkpoints; " in said
    seldom = [*[QUICK] * 39, Reading(1, 11.5, {CHECKPOINT: 10.0})]
    assert warnings(*seldom * 5) == []


def test_readings_of_moments_are_not_steady_yet():
    moment = Reading(1, 0.01, {})
    expected = Expected.of(Alarm(), 1000, 0.001)
    assert warnings(*[moment] * 400, expected=expected) == []
    assert len(warnings(*[moment] * 600, expected=expected)) == 1


def test_the_recipe_sets_the_throughput_or_turns_the_alarm_off():
    floor = Expected.of(Alarm(tokens_per_second=500), 1000, 1.0)
    assert floor == (2.0, 2.0, "alarm.tokens_per_second (500)")
    assert Expected.of(Alarm(tokens_per_second=0), 1000, 1.0) is None
    assert Expected.of(Alarm(), 1000, None) is None  # of a CPU no speed is planned
    assert Expected.of(Alarm(tokens_per_second=500), None, 1.0) is None
    with pytest.raises(ValueError, match="tokens_per_second is -1; it must be above 0"):
        Alarm(tokens_per_second=-1)
