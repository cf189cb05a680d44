"""Hours and money against sums done by hand, and restarts against runs that are played through."""

from datetime import date
from pathlib import Path

import numpy as np
import pytest

from windlass.config import Every
from windlass.errors import UserError
from windlass.planning import targets
from windlass.planning.cost import Assumed, Cost, cost, saved_bytes
from windlass.planning.extent import Extent
from windlass.planning.memory import Memory
from windlass.planning.prices import Price, Prices, warning
from windlass.planning.time import Time

TODAY = date.today().isoformat()
PRICES = Prices(
    date=TODAY,
    sources=[],
    prices=[
        Price("v5e", "gcp", "us-central1", 1.20, 0.342, TODAY),
        Price("v5e", "gcp", "us-east5", 1.20, 0.60, TODAY),
        Price("v5e", "gcp", "us-south1", 1.416, None, TODAY),
        Price("v3", "gcp", "us-central1", 2.00, 0.51, TODAY),
        Price("h100", "vast", None, 1.80, None, TODAY),
    ],
    file=Path("prices.yaml"),
    chips=["v5e", "v3", "h100"],
)
STEP = Time({"matmuls": 0.5}, error=0.1, bound="compute", flops=1e15)
LONG = Extent(tokens=32768, steps=72_000, epoch_steps=7200)  # ten hours of steps
AT_ONCE = Assumed(boot=0, compile=0)
NEVER = Every(10**9)


def costs(on: str = "v5e-8", **how) -> Cost:
    usual = {"every": NEVER, "saved": 0, "assumed": AT_ONCE}
    how = usual | how
    return cost(how.pop("time", STEP), how.pop("extent", LONG), targets.find(on), PRICES, **how)


def test_a_run_costs_its_hours_times_its_chips_times_the_cheapest_price():
    found = costs()
    assert found.run is not None and found.epoch is not None
    assert found.run.hours == pytest.approx((9, 10, 11))
    assert found.run.on_demand == pytest.approx((9 * 8 * 1.20, 10 * 8 * 1.20, 11 * 8 * 1.20))
    assert found.run.spot == pytest.approx((9 * 8 * 0.342, 10 * 8 * 0.342, 11 * 8 * 0.342))
    assert found.epoch.on_demand == pytest.approx((8.64, 9.60, 10.56))
    # A million tokens are 30.5 steps, of half a second each.
    assert found.million_tokens.hours[1] == pytest.approx(1e6 / 32768 * 0.5 / 3600)
    assert found.on_demand is not None and found.on_demand.region == "us-central1"


def test_on_v3_two_devices_are_one_chip_to_pay_for():
    run = costs("v3-8").run
    assert run is not None and run.on_demand is not None
    assert run.on_demand.expected == pytest.approx(10 * 4 * 2.00)


def test_compiling_booting_and_saving_take_time_too():
    # A GiB on each device, over the 16 GB/s that a v5e has to its host; every tenth of the run.
    how = {"every": Every(7200), "saved": 2**30, "assumed": Assumed(boot=100, compile=50)}
    run, epoch = costs(**how).run, costs(**how).epoch
    assert run is not None and epoch is not None
    save = 2**30 / 16e9
    seconds = 36000 + 100 + 50 + 11 * save + 2**30 * 4.8 / 6.4e9
    assert run.hours.expected == pytest.approx(seconds / 3600)
    assert epoch.hours.expected == pytest.approx((3600 + save) / 3600)


def played(work: float, between: float, restart: float, rate: float, runs: int) -> np.ndarray:
    """Hours of runs on machines that are taken away at random moments, played through."""
    random = np.random.default_rng(0)
    hours = np.zeros(runs)
    for run in range(runs):
        done = now = 0.0
        ready = 0.0  # when the machine begins to work
        taken = random.exponential(1 / rate)
        while done < work:
            ends = max(now, ready) + (work - done)
            if ends <= taken:
                now, done = ends, work
                break
            done += max(0.0, taken - max(now, ready)) // between * between
            now, ready = taken, taken + restart
            taken = now + random.exponential(1 / rate)
        hours[run] = now
    return hours


@pytest.mark.parametrize(("rate", "minutes"), [(0.1, 30), (0.5, 10), (0.02, 120)])
def test_the_hours_on_spot_are_those_of_runs_that_are_played_through(rate, minutes):
    assumed = Assumed(boot=240, compile=60, preemptions=rate)
    run = costs(every=Every(minutes, "min"), assumed=assumed).run
    assert run is not None and run.spot_hours is not None
    restart = 300 / 3600
    begins = restart + 10  # the first start is no restart
    hours = played(10, minutes / 60, restart, rate, runs=4000) + restart
    assert run.hours.expected == pytest.approx(begins)
    assert run.spot_hours.expected == pytest.approx(hours.mean(), rel=0.01)
    assert run.restarts == pytest.approx(rate * run.spot_hours.expected)
    assert run.lost_hours == pytest.approx(run.spot_hours.expected - begins)
    assert run.spot is not None and run.spot[1] == pytest.approx(run.spot_hours[1] * 8 * 0.342)


def test_a_run_that_loses_more_than_it_does_has_no_price_on_spot():
    assumed = Assumed(boot=0, compile=0, preemptions=3)
    found = costs(every=Every(1, "h"), assumed=assumed)
    assert found.run is not None
    assert (found.run.spot_hours, found.run.spot, found.run.restarts) == (None, None, None)
    assert found.run.on_demand is not None
    assert found.notes == [
        "at 3 preemptions an hour a run on spot machines would lose more than it gains: "
        "checkpoint.every must be shorter"
    ]


def test_of_a_run_of_unknown_length_a_restart_loses_half_of_what_lies_between_two_saves():
    extent = Extent(tokens=32768, steps=None, epoch_steps=None)
    assumed = Assumed(boot=0, compile=0, preemptions=0.5)
    found = costs(extent=extent, every=Every(1, "h"), assumed=assumed).million_tokens
    assert found.spot_hours is not None
    assert found.spot_hours.expected == pytest.approx(found.hours.expected / (1 - 0.5 * 0.5))


def test_no_run_takes_less_than_no_time_however_wrong_its_step_may_be():
    run = costs(time=STEP._replace(error=1.7)).run
    assert run is not None and run.on_demand is not None
    assert run.hours == pytest.approx((1, 10, 27)) and run.on_demand.low > 0


def test_what_is_not_known_is_none_and_is_said():
    seven = costs("7x-8")
    assert seven.run is not None and seven.run.hours.expected == pytest.approx(10)
    assert (seven.run.on_demand, seven.run.spot) == (None, None)
    assert seven.notes == [
        "no price of 7x on demand or spot is known; `windlass prices --update FILE` takes one"
    ]
    assert costs("h100").notes == [
        "no price of h100 spot is known; `windlass prices --update FILE` takes one"
    ]
    aws = Price("h100", "aws", None, 6.88, 2.5, TODAY)
    several = PRICES._replace(prices=[*PRICES.prices, aws])
    assert cost(STEP, LONG, targets.find("h100"), several, every=NEVER, saved=0).notes == [
        "no spot price of h100 is known at vast, the cheapest on demand; --region aws plans with "
        "$2.50 spot there"
    ]
    assert costs("cpu").notes == ["no price of a CPU is in the catalogue"]
    unknown = costs(extent=Extent(tokens=32768, steps=None, epoch_steps=None))
    assert (unknown.run, unknown.epoch) == (None, None)
    assert unknown.million_tokens.on_demand is not None
    assert unknown.notes == [
        "spot costs are without restarts: --preemptions 0.1 adds those of one preemption in ten "
        "hours"
    ]


def test_one_can_ask_for_a_place():
    east, south = costs(where="us-east5"), costs(where="us-south1")
    assert east.spot is not None and east.spot.spot == 0.60
    assert south.spot is None and south.on_demand is not None and south.on_demand.on_demand == 1.416
    assert south.notes == [
        "no price of v5e spot is known at us-south1; `windlass prices --update FILE` takes one"
    ]
    with pytest.raises(UserError) as refusal:
        costs(where="us-east")
    assert str(refusal.value) == (
        "no price is known at us-east; did you mean us-east5? there are gcp, us-central1, "
        "us-east5, us-south1 and vast"
    )


def test_old_prices_are_said_to_be_old():
    old = PRICES._replace(prices=[one._replace(date="2020-02-01") for one in PRICES.prices])
    target = targets.find("v5e-8")
    found = cost(STEP, LONG, target, old, every=NEVER, saved=0, assumed=Assumed(preemptions=0))
    assert found.notes == [warning(old.prices)]


def test_every_input_is_named_and_the_whole_can_be_written_down():
    plain = costs(every=Every(600, "s"), saved=16e9, assumed=Assumed(preemptions=0.1)).as_dict()
    assert plain["inputs"] == {
        **{"step_seconds": 0.5, "step_error_share": 0.1, "steps": 72_000, "steps_per_epoch": 7200},
        **{"tokens_per_step": 32768, "chips": 8, "saved_bytes_per_device": 16e9},
        **{"seconds_between_saves": 600, "save_seconds": 1.0, "first_save_seconds": 13.0},
        **{"boot_seconds": 180, "compile_seconds": 60, "preemptions_per_hour": 0.1, "region": None},
    }
    assert set(plain["run"]["spot_usd"]) == {"low", "expected", "high"}
    assert plain["spot"]["region"] == "us-central1"


def test_a_rate_below_nothing_is_refused():
    with pytest.raises(UserError) as refusal:
        costs(assumed=Assumed(preemptions=-1))
    assert str(refusal.value) == "preemptions is -1; it must be 0 or more"


def test_a_save_holds_what_changes():
    parts = {"weights": 4.0, "frozen": 100.0, "adapters": 1.0, "optimiser": 8.0, "rows": 50.0}
    assert saved_bytes(Memory(parts, limit=1000, error=0.1)) == 13
