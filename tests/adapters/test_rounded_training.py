"""Training on a grid: it wins back what rounding after training had cost."""

import json
from pathlib import Path

import pytest

from tests import tiny
from windlass.processes.signals import Signals
from windlass.training.loop import train

RECIPE = {
    "model": {"family": "qwen3", "vocab": 257, **tiny.WIDTHS},
    "data": {"source": {"kind": "stories", "count": 400}, "length": 64, "validation": 0.1},
    "optim": {"kind": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0},
    "train": {"steps": 300, "batch": 8, "seed": 1},
    "device": {"kind": "cpu", "count": 1},
}
STILL = {"optim": {"kind": "adamw", "learning_rate": 1e-30}}


def loss(folder: Path, **sections) -> float:
    """The validation loss at the end of a run."""
    train(RECIPE | sections, [f"run.dir={folder}"], signals=Signals())
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one["validation_loss"] for one in records if "validation_loss" in one][-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("adapter", "left"),
    [
        ({"kind": "grid", "format": "q4_0"}, 0.5),
        ({"kind": "grid", "format": "mxfp4"}, 0.5),
        ({"kind": "scalar", "bits": 2}, 0.3),
        ({"kind": "scalar", "bits": "ternary", "granularity": 32}, 0.3),
    ],
)
def test_training_on_a_grid_wins_back_most_of_what_rounding_costs(adapter, left, tmp_path):
    """Of three that saw the same tokens: plain, plain and then rounded, trained rounded."""
    start = loss(tmp_path / "start")
    assert start < 2.5
    more = {"model": {"run": str(tmp_path / "start")}, "train": RECIPE["train"] | {"steps": 100}}
    trained = more | {"adapter": adapter}
    plain, ours = loss(tmp_path / "plain", **more), loss(tmp_path / "trained", **trained)
    ended = {"model": {"run": str(tmp_path / "plain")}, "train": {"steps": 1, "batch": 8}}
    rounded = loss(tmp_path / "rounded", **ended, **STILL, adapter=adapter)
    print(f"{plain:.4f} plain, {rounded:.4f} rounded, {ours:.4f} trained rounded")
    assert ours - plain < left * (rounded - plain)
