"""What better settings gain, in words."""

import dataclasses

from tests.planning.plans import made
from windlass.planning.search import Best
from windlass.reports import gains, reasons


def laid_out(rows: int, **how):
    plan = made(**how)
    return dataclasses.replace(plan, settings={**plan.settings, "rows_per_device": rows})


def test_rows_are_counted_as_one_speaks_and_told_once():
    keys = {"train": {"accumulation": 8, "batch_per_device": 1}}
    told = list(gains.gain(Best(laid_out(1), laid_out(8), keys, 5)))
    assert told[-1] == ("why", "train.accumulation 8: 1 sequence per device and microbatch, not 8")
    assert [name for name, _ in told].count("why") == 1
    alone = dataclasses.replace(made(), settings={**made().settings, "batch": 1})
    assert dict(reasons.layout(alone))["batch"].startswith("1 sequence of 1,024 tokens: ")


def test_settings_of_a_recipe_that_are_not_sure_to_fit_are_not_praised():
    for gib, more in ((15.0, ""), (17.0, ", 1.2 GiB too much")):
        own = Best(made(gib=gib), made(gib=gib), {}, 3)
        assert dict(gains.gain(own))["best"] == (
            f"none of 3 settings tried is sure to fit; the recipe's own come nearest{more}"
        )


def test_what_is_paid_on_spot_takes_as_long_as_on_spot():
    # A start of 4 minutes and 25 s of steps are lost six times an hour: 64 minutes become 115.
    often = made(preemptions=6)
    assert dict(gains.gain(Best(often, often, {}, 3)))["run"].startswith("115 ±")


def test_what_a_compiler_said_of_memory_is_not_off_by_nothing():
    plan = made()
    sure = dataclasses.replace(plan, memory=plan.memory.as_compiled(plan.memory.total))
    assert dict(gains.gain(Best(sure, sure, {}, 3)))["memory"] == "8.0 of 15.8 GiB per device"
