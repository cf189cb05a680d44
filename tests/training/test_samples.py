"""Samples at each evaluation, and how their tokens are drawn."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

import windlass
from tests.training.test_loop import Told, refused

KEYS = [
    *("train.steps=2", "train.evaluate_every=1", "train.sample=Once", "train.sampling.tokens=12"),
    *("train.accumulation=1", "device.kind=cpu", "device.count=1"),
]


def samples(run: Path) -> dict[int, str]:
    parts = re.split(r"^--- step (\d+)\n", (run / "samples.txt").read_text(), flags=re.MULTILINE)
    return {int(step): text for step, text in zip(parts[1::2], parts[2::2], strict=True)}


def forget_sampling(run: Path) -> None:
    """Make the recipe of a run one of before `train.sampling`."""
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    del recipe["train"]["sampling"]
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (run / "files.json").unlink()


@pytest.mark.long
def test_a_run_whose_recipe_has_no_sampling_goes_on_with_samples_drawn_as_it_is_told_now(here):
    Told("run.dir=run", *KEYS)
    old = Path(shutil.copytree("run", "old"))
    forget_sampling(old)
    keys = [*KEYS, "train.steps=3", "train.sampling.temperature=0"]
    assert "resuming from step 2 of 3" in Told(f"run.dir={old}", *keys).text
    drawn, before = samples(old), samples(Path("run"))
    assert list(drawn) == [1, 2, 3] and [drawn[1], drawn[2]] == [before[1], before[2]]
    (greedy,) = windlass.generate(old, "Once", tokens=12, temperature=0)
    assert drawn[3] == f"Once{greedy}\n"


def test_a_sampling_that_means_nothing_is_refused_by_its_key():
    assert refused("train.sampling.top_p=0", "train.sampling.tempature=1") == (
        "1 problem in the recipe and the command line:\n"
        "  train.sampling.tempature  unknown; did you mean temperature?"
    )
    assert refused("train.sampling.top_p=0") == (
        "1 problem in the recipe and the command line:\n"
        "  train.sampling.top_p  is 0.0; it is a share, above 0 and at most 1"
    )
