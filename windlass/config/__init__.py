"""YAML and key=value into frozen dataclasses, or one error that lists every problem."""

from typing import Any

from windlass.config.commented import commented
from windlass.config.every import Due, Every
from windlass.config.limits import Limits, Within
from windlass.config.overrides import Overrides, words
from windlass.config.reading import Problem, listing, read
from windlass.config.recipe import KINDS, AnyRecipe, Layers, Written, find, load, shipped
from windlass.config.schema import comments, json_schema
from windlass.config.sections import Open, Several, below_one, differences, section, tree
from windlass.config.text import write

__all__ = [
    "KINDS",
    "AnyRecipe",
    "Due",
    "Every",
    "Layers",
    "Limits",
    "Open",
    "Overrides",
    "Problem",
    "Several",
    "Within",
    "Written",
    "below_one",
    "commented",
    "comments",
    "differences",
    "find",
    "json_schema",
    "listing",
    "load",
    "read",
    "section",
    "shipped",
    "to_yaml",
    "tree",
    "words",
]


def to_yaml(instance: Any) -> str:
    """A section as YAML that reads back to the same section."""
    return write(tree(instance))
