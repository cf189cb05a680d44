"""The search for the best settings, against every setting that there is."""

import itertools

import pytest

from tests import trained
from windlass.devices import mesh, mesh_choice
from windlass.devices.mesh import Mesh
from windlass.devices.mesh_choice import Rows
from windlass.planning import prices
from windlass.planning.memory import Memory
from windlass.planning.plan import PlanRequest
from windlass.planning.search import MARGIN, REMATS, Fixed, Search, best
from windlass.planning.targets import find
from windlass.planning.time import Time
from windlass.planning.traced import described
from windlass.planning.trials import Setting, Trial, Trials, divide, setting
from windlass.program.described import Described
from windlass.starting import origin

FREE = Fixed(rows=False, each=False, remat=False, loops=False, mesh=False)
HELD = {"none": 30.0, "saved": 12.0, "full": 3.0}  # bytes that a row leaves
TAKEN = {"none": 1.0, "saved": 1.1, "full": 1.4}  # seconds of a row
LLAMA_8B = dict(
    **dict(family="llama", vocab=128_256, embed=4096, mlp=14_336, layers=32),
    **dict(heads=32, kv_heads=8, head_dim=128, theta=5e5),
)
WORTH = {1: 1.0, 2: 0.96}  # of a step in loops of one layer, and of all


class MadeUp(Trials):
    """What settings take by formulas that are as crooked as the real thing."""

    def __init__(self, run: Described, limit: int):
        super().__init__(run, find("v5e-8"), limit=limit)

    def _estimate(self, setting: Setting, described: Described) -> Trial:
        assert self.limit is not None
        rows, split = described.batches.per_device, dict(setting.split)
        held = HELD[setting.remat] * rows / split["tensor"] + 400 / split["fsdp"] / split["tensor"]
        held += 5.0 * setting.layers_per_loop
        seconds = TAKEN[setting.remat] * rows + 0.5 + 0.02 * split["fsdp"] + 0.4 * split["tensor"]
        seconds = setting.accumulation * seconds * WORTH[setting.layers_per_loop]
        memory = Memory({"weights": held}, self.limit, 0.1)
        return Trial(setting, memory, Time({"matmuls": seconds}, 0.1, "compute", 1.0))


@pytest.fixture(scope="module")
def run() -> Described:
    """64 rows on 8 chips, which leaves what is searched open."""
    recipe = trained.recipe(train={"batch": 64})
    return described({**recipe, "by_device": {}, "device": {"kind": "tpu"}}, find("v5e-8"))


def every(trials: Trials) -> list[Trial]:
    run = trials.described
    able = mesh_choice.possible(Mesh(), 8, Rows(64, None), run.run.model.sizes)
    splits = [tuple((name, one[name]) for name in mesh.AXES) for one in able]
    found = [
        trials(Setting(split, count, remat, loops))
        for split, count, remat, loops in itertools.product(splits, (1, 2, 4, 8), REMATS, WORTH)
    ]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("limit", [60, 75, 110, 180, 300, 600, 2000])
def test_what_is_found_is_about_as_fast_as_the_fastest_of_all_that_fits(run, limit):
    trials = MadeUp(run, limit)
    found = Search(trials, trials.first, FREE).best()
    looked = trials.count
    fitting = [one for one in every(trials) if one.memory.fits]
    assert looked < trials.count / 2
    if not fitting:
        assert found == trials.least and not found.memory.fits
        return
    assert found.memory.fits
    assert found.seconds <= min(one.seconds for one in fitting) / (1 - MARGIN) ** 3


def test_the_search_begins_with_what_the_plan_itself_offers(run):
    trials = MadeUp(run, 75)
    offered = min((one for one in every(trials) if one.memory.fits), key=lambda one: one.seconds)
    trials.known.clear()
    found = Search(trials, trials.first, FREE, [offered]).best()
    assert found.memory.fits and found.seconds <= offered.seconds


def test_what_the_plan_offers_does_not_override_the_command_line(run):
    trials = MadeUp(run, 70)  # too little for a row at a time, unless all is computed again
    offered = trials(trials.first._replace(remat="full", accumulation=8))
    assert offered is not None and offered.memory.fits and trials.first.remat != "full"
    trials.known.clear()
    kept = FREE._replace(remat=True, mesh=True)
    assert Search(trials, trials.first, kept, [offered]).best().setting.remat == trials.first.remat


@pytest.mark.long  # a dozen traces of a large step
@pytest.mark.parametrize("adapter", [{"kind": "lora"}, None])
def test_best_is_no_slower_than_the_changes_that_the_plan_offers(adapter):
    recipe = {
        "model": LLAMA_8B,
        "tokenizer": {"kind": "byte"},
        "adapter": adapter,
        "data": {"source": {"kind": "jsonl", "path": "absent.jsonl"}, "length": 2048},
        "optim": {"kind": "adamw", "learning_rate": 1e-4},
        "train": {"steps": 1000, "batch": 64},
    }
    layers, target, known = origin.load(recipe, []), find("v6e-8"), prices.load()
    found = best(layers, target, known, PlanRequest())
    offered = found.before.tried
    assert offered is not None and found.before.fits == "no" and found.plan.fits == "yes"
    there = [one.time.seconds for one in offered.changes if one.setting and one.time]
    assert there and found.plan.time is not None
    assert found.plan.time.seconds <= 1.001 * min(there)
    # The keys that are written give the plan that is shown.
    again = described(recipe, target, found.words)
    assert setting(again).split == tuple(found.plan.settings["mesh"].items())


def test_what_the_command_line_says_stays_as_it_is(run):
    trials = MadeUp(run, 2000)
    fixed = Fixed(rows=True, each=False, remat=True, loops=True, mesh=True)
    assert Search(trials, trials.first, fixed).best().setting == trials.first
    assert trials.count == 1


@pytest.mark.parametrize("limit", [*range(40, 640, 60)])
def test_auto_takes_the_fewest_microbatches_that_fit(run, limit):
    trials = MadeUp(run, limit)
    divided = divide(trials)
    able = [trials(trials.first._replace(accumulation=n)) for n in (1, 2, 4, 8)]
    fitting = [one.setting.accumulation for one in able if one and one.memory.fits]
    assert divided.microbatches == (fitting[0] if fitting else 8)
