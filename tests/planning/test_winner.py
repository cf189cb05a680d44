"""Which of several targets is the best."""

import dataclasses

from tests.planning.plans import made
from windlass.planning.plan import Plan, Refused
from windlass.planning.search import Best
from windlass.planning.targets import find
from windlass.planning.winner import Ranking, Wanted, chosen


def best_of(*plans: Plan, wanted: Wanted = "cheapest") -> Ranking:
    refused = Refused("mine", find("v5e-4"), "7 rows on 4 devices")
    return chosen([Best(plan, plan, {}, 1) for plan in plans] + [refused], wanted)


def named(found: Ranking) -> str | None:
    return found.winner and found.winner.plan.target.name


def test_the_cheapest_and_the_fastest_are_of_those_that_fit_for_certain():
    # An hour of steps of 8 chips at $1.20, 4 hours of one at $2.00, and less of what is too small.
    plans = (
        made("v5e-8", seconds=0.5),
        made("h100", seconds=2.0),
        made("v5e-1", gib=15, seconds=0.4),
    )
    assert named(best_of(*plans)) == "h100"
    assert named(best_of(*plans, wanted="fastest")) == "v5e-8"
    assert named(best_of(plans[2])) is None


def test_a_run_that_trains_on_more_is_not_dearer_for_it():
    alone, eight = made("v5e-1"), made("v5e-8")
    # Ten times as many tokens, for eight times as many dollars.
    extent = eight.extent._replace(tokens=10 * eight.extent.tokens)
    assert named(best_of(alone, eight)) == "v5e-1"
    assert named(best_of(alone, dataclasses.replace(eight, extent=extent))) == "v5e-8"


def test_where_prices_are_missing_it_is_said_and_the_fastest_counts_if_all_are():
    some = best_of(made("v5e-8"), made("v6e-8", seconds=0.1))
    assert (named(some), some.by) == ("v5e-8", "cheapest")
    assert some.note == "no price of v6e-8 is known"
    none = best_of(made("v6e-8"), made("v6e-4", seconds=0.1))
    assert (named(none), none.by) == ("v6e-4", "fastest")
    assert none.note == "no price is known, so targets are ranked by speed"
