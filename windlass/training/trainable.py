"""Which weights are trained: chosen once, by patterns, before the run."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
from jax.tree_util import GetAttrKey, SequenceKey
from jaxtyping import PyTree

from windlass.errors import UserError


class Chosen(NamedTuple):
    """True at each array that is trained, and how many numbers that is."""

    mask: PyTree
    trained: int
    total: int


def choose(arrays: PyTree, patterns: tuple[str, ...]) -> Chosen:
    """The arrays whose name matches a pattern, as `blocks.mlp.*` does `blocks.mlp.gate.weight`."""
    named = [(name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]
    names = [one for one, _ in named]
    idle = [p for p in patterns if not any(fnmatchcase(one, p) for one in names)]
    if idle:
        raise UserError(
            f"train.trainable: {', '.join(idle)} matches no weight; there are\n  "
            + "\n  ".join(dict.fromkeys(names))
        )
    chosen = [any(fnmatchcase(one, p) for p in patterns) for one in names]
    sizes = [x.size for _, x in named]
    mask = jax.tree.unflatten(jax.tree.structure(arrays), chosen)
    trained = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
    return Chosen(mask, trained, sum(sizes))


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
