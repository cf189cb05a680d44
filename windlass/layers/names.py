"""The names of a model's arrays, and the patterns that choose among them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.tree_util import GetAttrKey, SequenceKey
from jaxtyping import PyTree

from windlass.config.reading import closest
from windlass.errors import UserError


def named(arrays: PyTree) -> list[tuple[str, Any]]:
    """Every array with its name, such as `blocks.mlp.gate.weight`."""
    return [(name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]


def name(path: tuple) -> str:
    """An array's name: the fields that lead to it. The kinds of a stack do not show."""
    parts: list[str] = []
    for key in path:
        match key:
            case GetAttrKey(name="kinds"):
                pass
            case GetAttrKey(name=part):
                parts.append(part)
            case SequenceKey():
                pass
            case _:
                parts.append(str(key).strip(".[]'"))
    return ".".join(parts)


def first_match(one: str, patterns: Sequence[str]) -> int | None:
    """The number of the first pattern that a name matches, as it does `blocks.mlp.*`."""
    return next((i for i, pattern in enumerate(patterns) if fnmatchcase(one, pattern)), None)


def refuse_idle(key: str, patterns: Sequence[str], names: Sequence[str], what: str) -> None:
    """Refuse patterns that match none of the names, with the names there are."""
    idle = [p for p in patterns if not any(fnmatchcase(one, p) for one in names)]
    if not idle:
        return
    near = dict.fromkeys(filter(None, (closest(pattern, names) for pattern in idle)))
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(
        f"{key}: {', '.join(idle)} matches no {what}; {hint}there are\n  "
        + "\n  ".join(dict.fromkeys(names))
    )
