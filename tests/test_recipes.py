"""Every recipe that ships: it opens with what to expect, and it runs."""

import dataclasses
import importlib
import math

import pytest

import windlass
from windlass.config import load, shipped, tree
from windlass.data.tokenizer import SMALLEST_VOCABULARY
from windlass.training.session import describe

VOCAB = SMALLEST_VOCABULARY + 20
SMALL = [
    "train.steps=2",
    "train.batch=8",
    "data.length=32",
    "data.source.count=100",
    "data.validation=0.05",
    "device=cpu",
    "device.count=1",
]


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_opens_with_its_command_hardware_time_and_the_number_to_expect(name):
    text = shipped()[name].read_text(encoding="utf-8")
    opening = text[: text.index("\n\n")]
    first, *rest = [line.removeprefix("#").strip() for line in opening.splitlines()]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert first.endswith(".") and len(first) < 100
    assert f"windlass train {name}" in rest
    words = " ".join(rest)
    assert "Hardware: " in words
    assert "minute" in words or "hour" in words
    assert "Expect " in words


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_is_in_order_as_it_is_written(name):
    assert describe(name, ["device=cpu"]).name == name


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_runs_two_steps_reduced(name, tmp_path):
    trained = windlass.train(reduced(name), [*SMALL, f"run.dir={tmp_path}/run"])
    assert (trained.step, trained.is_finished) == (2, True)
    assert math.isfinite(trained.metrics["loss"])
    assert trained.metrics["validation_loss"] < 1.5 * math.log(VOCAB)


def reduced(name: str) -> dict:
    """A recipe with the tiny model of its family, and a vocabulary as small as can be learned."""
    recipe = load(name).merged("cpu")
    family = recipe["model"]["family"]
    tiny = importlib.import_module(f"windlass.models.{family}").Config.tiny()
    recipe["model"] = {"family": family, **tree(dataclasses.replace(tiny, vocab=VOCAB))}
    if recipe["tokenizer"]["kind"] == "bpe":
        recipe["tokenizer"]["vocab"] = VOCAB
    return recipe
