"""Tensors of checkpoints that have more than a language model: a vision tower, say.

Those of the language model are read under its own names; the others are named, and left alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from windlass.config import listing
from windlass.hub import config as configs
from windlass.models import HuggingFace

Tensor = TypeVar("Tensor")
OWN = "model."  # in front of the names of a language model


def table(folder: Path) -> HuggingFace | None:
    """The table of the family whose model is in a folder; None: it is of no other's."""
    has_config = (folder / configs.FILE).is_file()
    return configs.table_of(configs.load(folder)) if has_config else None


def of_language(stored: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder that are of its language model, by their names in that alone."""
    about = table(folder)
    if about is None:
        return dict(stored)
    prefix = "" if about.multimodal is None else about.multimodal.prefix
    aside = tuple(beside(configs.load(folder)))
    return {
        OWN + name.removeprefix(prefix) if prefix and name.startswith(prefix) else name: one
        for name, one in stored.items()
        if not name.startswith(aside)
    }


def left_alone(names: Iterable[str], folder: Path) -> str | None:
    """The tensors of a folder that nothing is computed with, in words; None: there are none."""
    aside = {} if table(folder) is None else beside(configs.load(folder))
    counts, first = Counter(), {}
    for name in names:
        if (prefix := next((one for one in aside if name.startswith(one)), None)) is not None:
            counts[aside[prefix]] += 1
            first.setdefault(aside[prefix], f"{prefix}*")
    alone = Counter(aside.values())
    said = [
        f"{counts[what]:,} of {what} ({first[what]}{', ...' * (alone[what] > 1)})"
        for what in alone
        if counts[what]
    ]
    return f"tensors: {listing(said, 'and')}" if said else None


def beside(config: Mapping[str, Any]) -> dict[str, str]:
    """Prefixes of tensors that nothing is computed with, and what they are of, by a config.json."""
    about = configs.table_of(config)
    if about is None:
        return {}
    unused = {} if about.unused is None else about.unused(configs.language(config))
    return {**about.beside, **{name_there(one, config): what for one, what in unused.items()}}


def name_there(name: str, config: Mapping[str, Any]) -> str:
    """The name that a tensor of a language model has in a checkpoint with this config.json."""
    about = configs.table_of(config)
    if about is None or about.multimodal is None or configs.TEXT not in config:
        return name
    return about.multimodal.prefix + name.removeprefix(OWN) if name.startswith(OWN) else name
