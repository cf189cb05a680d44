"""Which weights are trained: chosen once, by patterns, before the run."""

from typing import NamedTuple

import jax
from jaxtyping import PyTree

from windlass.adapters import own
from windlass.layers.names import first_match, named, refuse_idle


class Chosen(NamedTuple):
    """True at each array that is trained, and how many numbers that is."""

    mask: PyTree
    trained: int
    total: int


def choose(arrays: PyTree, patterns: tuple[str, ...] | None) -> Chosen:
    """The arrays whose name matches a pattern, as `blocks.mlp.*` does `blocks.mlp.gate.weight`.

    Without patterns those of the adapter, and where there is none, all.
    """
    names, sizes = zip(*((one, x.size) for one, x in named(arrays)), strict=True)
    if patterns is None:
        chosen = jax.tree.leaves(own(arrays))
        chosen = chosen if any(chosen) else [True] * len(names)
    else:
        refuse_idle("train.trainable", patterns, names, "weight")
        chosen = [first_match(one, patterns) is not None for one in names]
    mask = jax.tree.unflatten(jax.tree.structure(arrays), chosen)
    trained = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
    return Chosen(mask, trained, sum(sizes))
