"""What a plan says, and how plans of several values are told apart."""

import dataclasses
import json

import pytest

from tests.planning.plans import GIB, made, without_time
from windlass.planning import matrix
from windlass.planning.compiler import CompilerReport
from windlass.planning.plan import CompilerCheck, Refused
from windlass.planning.targets import find


@pytest.mark.parametrize(
    "gib, fits", [(14.3, "yes"), (14.4, "tight"), (15.7, "tight"), (15.8, "no")]
)
def test_it_fits_for_certain_where_it_does_even_if_the_estimate_is_as_wrong_as_it_may_be(gib, fits):
    # A v5e has 15.75 GiB, and the estimate may be a tenth too low: 15.75 / 1.1 is 14.32.
    plan = made("v5e-8", gib=gib)
    assert plan.fits == fits
    assert plan.lacks == pytest.approx(0.05 * GIB if fits == "no" else 0)


def test_json_has_the_same_figures_with_their_units_in_the_names():
    plan = made("v5e-8", seconds=0.5)
    told = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert told["target"] == {
        "name": "v5e-8", "chip": "TPU v5e", "devices": 8, "chips": 8, "hosts": 1,
    }  # fmt: skip
    assert told["fits"] == "yes"
    assert told["memory"]["total_bytes"] == 8 * GIB
    assert sum(told["memory"]["parts_bytes"].values()) == 8 * GIB
    assert told["time"]["step_seconds"] == pytest.approx(0.5)
    assert told["time"]["tokens_per_second"] == pytest.approx(64 * 1024 / 0.5)
    assert told["time"]["mfu"] == pytest.approx(0.4)  # as much of the peak as was made up
    # 7200 steps of half a second are an hour, and a machine starts and compiles in 4 minutes.
    assert told["cost"]["run"]["hours"]["expected"] == pytest.approx(1 + 4 / 60)
    assert told["cost"]["run"]["on_demand_usd"]["expected"] == pytest.approx(8 * 1.2 * 16 / 15)
    assert told["length"] == {"tokens_per_step": 65536, "steps": 7200, "steps_per_epoch": 720}


def test_where_no_speed_is_known_the_memory_is_told_all_the_same():
    told = without_time(made()).as_dict()
    assert told["time"] is None and told["cost"] is None
    assert told["memory"]["total_bytes"] == 8 * GIB


@pytest.mark.parametrize("gib, fits", [(15.7, "yes"), (15.8, "no")])
def test_what_a_compiler_takes_fits_only_into_what_a_program_may_use(gib, fits):
    plan = made(gib=gib)
    found = CompilerReport("XLA", round(gib * GIB), True, None, None, None, None, 1.0)
    memory = plan.memory.as_compiled(found.peak_bytes)
    compiled = CompilerCheck(found, gib * GIB)
    assert dataclasses.replace(plan, memory=memory, compiled=compiled).fits == fits


def test_the_best_is_the_fastest_that_fits_for_each_target_and_of_the_last_key_alone():
    def one(on, rank, batch, gib, seconds):
        return made(on, gib=gib, seconds=seconds, keys=(f"rank={rank}", f"batch={batch}"))

    found = [
        one("v5e-1", 8, 4, 8, 1.0),
        one("v5e-1", 8, 8, 9, 0.9),
        one("v5e-1", 8, 16, 20, 0.5),  # does not fit
        one("v5e-8", 8, 4, 8, 0.2),
        one("v5e-8", 8, 8, 8, 0.3),
        one("v5e-8", 16, 4, 8, 0.3),
        Refused("mine", find("v5e-8"), "it is odd", ("rank=16", "batch=7")),
    ]
    assert matrix.best(found) == [found[1], found[3], found[5]]
