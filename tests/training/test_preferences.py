"""Losses of preferences in whole runs: the same on a mesh, through a stop, and planned."""

import json
import math
from pathlib import Path

import pytest

from tests import tiny
from tests.training.campaign import weights
from tests.training.test_loop import Told
from windlass import api
from windlass.planning.plan import Plan
from windlass.run_folder import folder as folders
from windlass.telemetry import metrics

WORDS = "ash bay cedar dune elm fern gale heath iris jade".split()
MESH = ["device.count=8", "mesh={data: 2, fsdp: 2, tensor: 2}", "train.accumulation=2"]
KEYS = ["train.steps=4", "train.evaluate_every=2", "checkpoint.every=1"]
OBJECTIVES = {
    # A square that four steps do not bring near zero, where it is nothing but rounding.
    "ipo": {"kind": "ipo", "beta": 0.25},
    "kto": {"kind": "kto", "beta": 0.5},
    "simpo": {"kind": "simpo"},
    "orpo": {"kind": "orpo"},
    "reward": {"kind": "reward", "center": 0.01},
}

pytestmark = pytest.mark.long


def write(place: Path) -> None:
    """Of any word the answer in capitals is preferred to that with a question mark."""
    pairs, labelled = [], []
    for number in range(60):
        word = f"{WORDS[number % 10]} {WORDS[number // 10]}"
        pair = {"prompt": f"{word}: ", "chosen": word.upper(), "rejected": f"{word}?"}
        pairs.append(pair)
        for name, label in (("chosen", True), ("rejected", False)):
            one = {"prompt": pair["prompt"], "completion": pair[name], "label": label}
            labelled.append(one)
    for name, rows in (("pairs", pairs), ("unpaired", labelled)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (place / f"{name}.jsonl").write_text(text)


def recipe(place: Path, name: str) -> dict:
    format = "unpaired" if name == "kto" else "pairs"
    source = {"kind": "jsonl", "path": str(place / f"{format}.jsonl")}
    return {
        "model": {"family": "llama", "vocab": 257, **tiny.WIDTHS},
        "data": {"source": source, "format": format, "length": 64, "validation": 0.2},
        "objective": OBJECTIVES[name],
        "optim": {"kind": "adamw", "learning_rate": 1e-2, "eps": 1e-6},
        "train": {"steps": 4, "batch": 8},
        "telemetry": {"every": 1},
        "device": {"kind": "cpu", "count": 1},
    }


def records(run: Path) -> list[dict]:
    return [one for one in metrics.read(run / folders.METRICS) if "loss" in one]


def measured(run: Path) -> list[float]:
    found = metrics.read(run / folders.METRICS)
    return [one["validation_loss"] for one in found if "validation_loss" in one]


@pytest.fixture(scope="module", params=OBJECTIVES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(name, tmp_path_factory) -> Path:
    """The run of an objective on one device, never disturbed."""
    place = tmp_path_factory.mktemp(name)
    write(place)
    Told(*KEYS, f"run.dir={place / 'run'}", recipe=recipe(place, name))
    return place / "run"


def test_losses_are_the_same_on_a_mesh_of_all_three_axes_in_microbatches(name, whole, tmp_path):
    Told(*KEYS, f"run.dir={tmp_path}", *MESH, recipe=recipe(whole.parent, name))
    alone, split = records(whole), records(tmp_path)
    assert len(alone) == len(split) == 4
    for one, other in zip(alone, split, strict=True):
        assert other["token_hash"] == one["token_hash"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        if name != "kto":  # which has no pairs
            assert other["margin"] == pytest.approx(one["margin"], rel=1e-5, abs=1e-6)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
    assert measured(tmp_path) == pytest.approx(measured(whole), rel=1e-4)


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_bits(name, whole, tmp_path):
    for stops in (2, None):
        Told(*KEYS, f"run.dir={tmp_path}", recipe=recipe(whole.parent, name), stops=stops)
    assert weights(tmp_path) == weights(whole)
    assert api.evaluate(tmp_path)["loss"] == measured(whole)[-1]


def test_what_is_not_compared_with_the_first_weights_makes_no_column_of_them(name, whole):
    assert (whole / "reference").exists() == (name in ("ipo", "kto"))
    first = records(whole)[0]
    expected = {"ipo": (0 - 1 / (2 * 0.25)) ** 2, "kto": 0.5}
    if name in expected:  # nothing has moved yet
        assert first["loss"] == pytest.approx(expected[name], abs=1e-6)
    assert all(math.isfinite(one["loss"]) for one in records(whole))
    if name == "kto":  # of the step before, and of no answers but those of others
        divergence = [one["kl"] for one in records(whole)]
        assert divergence[0] == 0 and all(one >= 0 for one in divergence)


def test_a_plan_is_made_for_accelerators_that_are_not_here(name, whole):
    for plan in api.plans([recipe(whole.parent, name)], "v5e-8,h100", rows=1000):
        assert isinstance(plan, Plan) and plan.memory.total > 0, plan
        assert plan.time is not None and plan.time.seconds > 0, plan
