"""Memory that runs out: what is said of it, and what is offered."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from tests.training.campaign import RECIPE
from windlass.planning import changes, exhausted, targets, traced, trials
from windlass.planning import memory as memories
from windlass.planning import time as times
from windlass.planning.exhausted import ReportedSizes
from windlass.planning.memory import Memory
from windlass.planning.targets import Target
from windlass.planning.traced import Traced
from windlass.program.described import Described, Divided
from windlass.telemetry.memory import is_exhausted

GIB = 2**30
TPU = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(31.66G) exceeds available HBM (31.24G). HLO module: jit_step."
)
GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB."


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (TPU, ReportedSizes(31.66 * GIB, None)),
        (GPU, ReportedSizes(None, 2.5 * GIB)),
        (
            "RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.",
            ReportedSizes(None, 4096),
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 18.46G of 15.75G hbm. Exceeded hbm capacity by 2.71G.",
            ReportedSizes(18.46 * GIB, None),
        ),
        ("RESOURCE_EXHAUSTED: who knows", ReportedSizes(None, None)),
    ],
)
def test_the_sizes_are_read_from_the_words_of_compilers_and_allocators(text, sizes):
    assert exhausted.reported_sizes(text) == sizes


def test_what_a_cpu_says_when_memory_runs_out_is_understood():
    with pytest.raises(JaxRuntimeError) as error:
        jnp.zeros(2**50, jnp.uint8).block_until_ready()
    assert is_exhausted(error.value)
    assert exhausted.reported_sizes(str(error.value)) == ReportedSizes(None, 2**50)
    assert not is_exhausted(JaxRuntimeError("INVALID_ARGUMENT: no"))


@pytest.fixture(scope="module")
def large() -> Traced:
    """A run of which each of four TPUs computes four rows at a time."""
    target = targets.find("v5e-4")
    keys = ["train.batch=16", "train.accumulation=1", "mesh.data=4"]
    return laid_out(traced.described(RECIPE, target, keys), target)


def laid_out(described: Described, target: Target) -> Traced:
    """A run of which only the layout is asked for, and no program."""
    return Traced(target, described, *[None] * 4)  # pyright: ignore


@pytest.fixture
def by_rows(monkeypatch) -> None:
    """Memory and time in round numbers, which follow from the layout as the real ones do."""

    def memory(one: Traced) -> Memory:
        run, rows = one.described.run, one.batches.per_device
        state = 2 * GIB / one.split["fsdp"] / (8 if run.adapter else 1)
        share = {"none": 1.0, "saved": 0.5, "full": 0.25}[run.train.remat]
        parts = {"activations": rows * share * GIB, "optimiser": state, "logits": GIB / 8}
        return Memory(parts, 4 * GIB, 0.05)

    def time(one: Traced) -> times.Time:
        share = {"none": 1.0, "saved": 1.1, "full": 1.3}[one.described.run.train.remat]
        seconds = share * (1 + one.batches.accumulation / 10) * 4 / one.target.devices
        return times.Time({"matmuls": seconds}, 0.1, "compute", 1e12)

    monkeypatch.setattr(changes, "trace", laid_out)
    monkeypatch.setattr(trials, "trace", laid_out)
    monkeypatch.setattr(memories, "memory", memory)
    monkeypatch.setattr(times, "time", time)


def test_out_of_memory_is_told_by_what_filled_it_and_by_what_would_fit(large, by_rows, tmp_path):
    memory = memories.memory(large)._replace(limit=3 * GIB)
    said = exhausted.explain(large, memory, GPU, "after step 40", tmp_path)
    assert said == (
        "out of memory after step 40: a step needs about 4.1 GiB on each TPU v5e, of which a "
        "program may use 3.0 GiB: 1.1 GiB too much\n"
        "the most of it: activations 2.0 GiB (of 4 sequences of 64 tokens, train.remat=saved), "
        "optimiser 2.0 GiB (adamw), logits 128.0 MiB (of 4 sequences of 64 tokens, vocabulary "
        "257)\n"
        "what would fit:\n"
        "  on v5e-8                               2.1 GiB, a step 50% faster\n"
        "  mesh.data=1 mesh.fsdp=4 mesh.tensor=1  2.6 GiB, a step as fast\n"
        "  train.accumulation=4                   2.6 GiB, a step 27% slower\n"
        "Nothing was trained yet: the same command with one of these begins again"
    )


def test_where_the_estimate_is_known_to_be_too_low_more_is_changed(large, by_rows, monkeypatch):
    monkeypatch.setattr(changes, "_larger", lambda target: iter(()))
    found = changes.several(large, memories.memory(large), too_low=1.6)
    assert {one.keys: one.memory.total / GIB for one in found.changes} == {
        "train.remat=full train.accumulation=4": 2.375,
        "adapter.kind=lora": 2.375,
    }


def test_a_run_that_chooses_its_rows_chooses_anew_with_other_keys_or_is_told_fewer(
    by_rows, monkeypatch
):
    monkeypatch.setattr(changes, "_larger", lambda target: iter(()))
    target = targets.find("v5e-4")
    keys = ["train.batch=16", "train.accumulation=null", "train.microbatch=auto", "mesh.data=4"]
    auto = traced.described(RECIPE, target, [*keys, "train.remat=none"])
    rows = dataclasses.replace(auto, divided=Divided(2, "two rows at a time"))
    memory = memories.memory(laid_out(rows, target))._replace(limit=int(3.3 * GIB))
    found = changes.several(laid_out(rows, target), memory)
    assert {one.keys: one.memory.total / GIB for one in found.changes} == {
        "train.remat=saved": 3.125,  # of two rows; four would not fit
        "train.microbatch=null train.accumulation=4": 3.125,
        "mesh.data=1 mesh.fsdp=4 mesh.tensor=1": 2.625,
    }


def test_where_nothing_fits_the_nearest_is_named(large, by_rows, monkeypatch, tmp_path):
    monkeypatch.setattr(changes, "_larger", lambda target: iter(()))
    said = exhausted.explain(
        large, memories.memory(large)._replace(limit=GIB // 16), TPU, "in the first step", tmp_path
    )
    assert said.splitlines()[0] == (
        "out of memory in the first step: a step needs about 31.7 GiB on each TPU v5e, of which a "
        "program may use 64.0 MiB: 31.6 GiB too much"
    )
    assert said.splitlines()[2] == (
        "nothing that was tried would fit; the least is 2.4 GiB, by train.remat=full "
        "train.accumulation=4"
    )


def test_a_change_that_the_recipe_does_not_take_is_not_offered_and_no_error():
    target = targets.find("cpu")
    groups = ["optim.groups=[{match: embedding.weight, kind: sign}]", "train.remat=full"]
    run = traced.trace(traced.described(RECIPE, target, groups), target)
    none = memories.memory(run)._replace(limit=1)
    found = changes.several(run, none)
    assert found.changes == [] and found.least is not None
    assert found.least.keys.startswith("train.accumulation=")  # an adapter has no embedding
