"""A recipe written out for people to edit."""

import re

import pytest

from windlass.config import Written, commented, load, shipped
from windlass.run import Run


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_that_ships_reads_back_the_same_and_fits_a_screen(name):
    recipe = load(name).merged(None)
    text = commented(recipe, Run)
    assert load(Written(name, text)).merged(None) == recipe
    assert max(map(len, text.splitlines())) <= 100


def test_each_key_stands_beside_its_meaning_and_those_left_out_with_their_defaults():
    text = commented(load("quickstart").merged(None), Run)
    assert "  layers: 4  # number of transformer blocks\n" in text
    assert "  batch: 16  # global batch size: sequences per optimizer step\n" in text
    assert "  # seed: 0  # random seed of the weights, the order of the data and dropout\n" in text


def test_a_key_that_is_uncommented_is_read():
    text = commented(load("quickstart").merged(None), Run)
    edited = re.sub(r"# (seed: 0  # random seed)", r"\1", text)
    assert load(Written("x", edited)).merged(None)["train"]["seed"] == 0


def test_what_no_section_knows_is_written_as_it_is():
    recipe = {"model": {"family": "none", "x": 1}, "by_device": {"tpu": {"train.batch": 2}}}
    text = commented(recipe, Run)
    assert "  x: 1\n" in text and "by_device:\n" in text
