"""The page of recipes has every one that ships, with the figures that the planner prints."""

from itertools import chain
from pathlib import Path

import pytest
from huggingface_hub import constants

from docs import recipes
from windlass.config import shipped

PAGE = (Path(__file__).parents[2] / "docs" / recipes.PAGE).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Settings that a page changes while it is made are as before when it is done."""
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.setattr(constants, name, getattr(constants, name))


def test_every_recipe_that_ships_is_in_one_group():
    assert sorted(chain(*recipes.GROUPS.values())) == sorted(shipped())


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_has_its_own_words_and_a_row_for_each_target(name):
    part = PAGE.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    assert "\n".join(recipes.head(name)).strip() in part
    for target in recipes.targets(name):
        assert f"\n| {target} | " in part


def test_the_figures_of_the_first_recipe_are_those_of_its_plan():
    assert "\n".join(recipes.table("quickstart")) in PAGE


def test_a_page_of_which_no_figure_is_made_anew_is_the_same():
    assert recipes.page(PAGE, ()) == PAGE


@pytest.mark.long
def test_all_figures_are_those_of_the_plans():
    assert recipes.page() == PAGE, "run make plans"
