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
    "train": {"steps": 200, "batch": 8, "seed": 1},
    "device": {"kind": "cpu", "count": 1},
}
STILL = {"optim": {"kind": "adamw", "learning_rate": 1e-30}}


def loss(folder: Path, **sections) -> float:
    """The validation loss at the end of a run."""
    train(RECIPE | sections, [f"run.dir={folder}"], signals=Signals())
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one["validation_loss"] for one in records if "validation_loss" in one][-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Path, float]:
    """A run, one that goes on from it for some steps, and the loss there."""
    here = tmp_path_factory.mktemp("plain")
    loss(here / "start")
    return here / "start", here / "more", loss(here / "more", **more(here / "start"))


def more(start: Path) -> dict:
    return {"model": {"run": str(start)}, "train": RECIPE["train"] | {"steps": 80}}


@pytest.mark.long
@pytest.mark.parametrize(
    "adapter",
    [{"kind": "grid", "format": "q4_0"}, {"kind": "scalar", "bits": 2}],
    ids=["q4_0", "2 bits"],
)
def test_training_on_a_grid_wins_back_most_of_what_rounding_costs(adapter, plain, tmp_path):
    """Of three that saw the same tokens: plain, plain and then rounded, trained rounded."""
    start, end, least = plain
    trained = loss(tmp_path / "trained", **more(start), adapter=adapter)
    still = STILL | {"model": {"run": str(end)}, "train": {"steps": 1, "batch": 8}}
    rounded = loss(tmp_path / "rounded", **still, adapter=adapter)
    print(f"{least:.4f} plain, {rounded:.4f} rounded, {trained:.4f} trained rounded")
    assert trained - least < 0.5 * (rounded - least)
