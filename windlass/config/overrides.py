"""Overrides of a recipe as Python writes them, turned into the words of a command line."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from windlass.config.sections import flat, tree
from windlass.config.text import write_inline
from windlass.errors import UserError

Overrides = str | Sequence[str] | Mapping[str, Any]


def words(overrides: Overrides = (), keys: Mapping[str, Any] | None = None) -> list[str]:
    """Words `key=value` of a list of them, one alone or a mapping; then those of keywords.

    Mappings may be nested or have dotted keys: `{"train.steps": 5}` is `{"train": {"steps": 5}}`.
    """
    if isinstance(overrides, str):
        listed = [overrides]
    elif isinstance(overrides, Mapping):
        listed = _assignments(overrides)
    elif isinstance(overrides, Sequence) and all(isinstance(word, str) for word in overrides):
        listed = list(overrides)
    else:
        raise UserError(
            f"overrides is {overrides!r}; it must be a list such as ['train.steps=5'], or a "
            "mapping such as {'train.steps': 5}"
        )
    return [*listed, *_assignments(keys or {})]


def _assignments(mapping: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_text(key, value)}" for key, value in flat(tree(dict(mapping))).items()]


def _text(key: str, value: Any) -> str:
    """Value as a command line has it; numbers and arrays of NumPy and JAX are plain."""
    try:
        return write_inline(value.tolist() if hasattr(value, "tolist") else value)
    except yaml.YAMLError:
        raise UserError(
            f"{key} is {value!r}; a value is a number, text, true, false, null, a list or a mapping"
        ) from None
