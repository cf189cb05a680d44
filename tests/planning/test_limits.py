"""What a run may cost and take, and what is left out for it."""

import pytest

from tests.planning.plans import made
from windlass import api
from windlass.config import Limits, Within
from windlass.errors import UserError
from windlass.planning.limits import enforce
from windlass.planning.plan import Plan

# 7200 steps of half a second are an hour, a start takes 4 minutes: $10.24 of 8 v5e at $1.20.
EIGHT = made("v5e-8")
SLOW = made("v5e-1", seconds=4.0)  # 8 h 4 min, $9.68
H100 = made("h100", seconds=2.0)  # 4 h 4 min, $8.13
LARGE = made("v5e-4", gib=17)
OTHER = made("v6e-8", seconds=0.1)  # nobody knows its price


def told(budget: float | None = None, within: str | None = None, *plans: Plan) -> list[str]:
    limits = Limits(budget=budget, within=Within.read(within) if within else None)
    found = enforce(plans or [EIGHT, SLOW, H100, LARGE], limits)
    return [getattr(one, "why", "kept") for one in found]


@pytest.mark.parametrize(
    "limits, expected",
    [
        ((), ["kept", "kept", "kept", "kept"]),
        (
            (10.0,),
            [
                "left out: $10.24 on demand, $0.24 above --budget",
                *("kept", "kept"),
                "left out: it needs 1.2 GiB more than a device has",
            ],
        ),
        (
            (10.0, "6h"),
            [
                "left out: $10.24 on demand, $0.24 above --budget",
                "left out: 8.07 h, 2.07 h longer than --within",
                "kept",
                "left out: it needs 1.2 GiB more than a device has",
            ],
        ),
    ],
)
def test_what_takes_too_much_is_left_out_with_what_it_misses_by(limits, expected):
    assert told(*limits) == expected


def test_spot_counts_where_somebody_says_how_often_such_machines_are_taken_away():
    rate = made("v5e-8", preemptions=0.001)
    assert told(3.0, None, rate) == ["kept"]


def test_what_is_in_time_on_demand_and_cheap_enough_on_spot_alone_is_left_out():
    # Six times an hour 25 s of steps and a start of 4 minutes are lost: 1.79 times as long on spot.
    often = made("v5e-8", preemptions=6)
    assert told(5.0, "90min", often, made("h100")) == [
        "left out: 115 min, 24.6 min longer than --within",
        "kept",
    ]
    assert told(5.0, "2h", often) == told(11.0, "90min", often) == ["kept"]


@pytest.mark.parametrize(
    "limits, plans, message",
    [
        (
            (8.0, "30min"),
            [EIGHT, SLOW, H100],
            "nothing keeps to --budget 8 and --within 30min; the nearest is mine on v5e-8: $10.24 "
            "on demand, $2.24 above --budget and 64.0 min, 34.0 min longer than --within",
        ),
        (
            (50.0, None),
            [OTHER],
            "nothing keeps to --budget 50: mine on v6e-8: no price of a TPU v6e is known",
        ),
        (
            (None, "2d"),
            [made("v5e-8", steps=None)],
            "nothing keeps to --within 2d: mine on v5e-8: its duration is not known; "
            "--rows N may give it",
        ),
    ],
)
def test_where_nothing_is_left_the_nearest_is_named(limits, plans, message):
    with pytest.raises(UserError) as refusal:
        told(*limits, *plans)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "text, hours", [("90min", 1.5), ("6h", 6), ("2 days", 48), ("0.5d", 12), ("1 Hour", 1)]
)
def test_a_time_has_a_number_and_a_unit(text, hours):
    read = Within.read(text)
    assert read.hours == hours and Within.read(read.written()) == read


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"within": "6 weeks"},
            "1 problem in the call:\n"
            '  within  is "6 weeks"; it must be a time such as 90min, 6h or 2d',
        ),
        ({"budget": -1}, "1 problem in the call:\n  budget  is -1; it must be above 0, in USD"),
        ({"within": "0h"}, '1 problem in the call:\n  within  is "0h"; it must be above 0'),
    ],
)
def test_a_limit_that_is_none_is_refused(given, message):
    with pytest.raises(UserError) as refusal:
        api.plans(["quickstart"], "v5e-8", **given)
    assert str(refusal.value) == message
