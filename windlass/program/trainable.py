"""The trainable part of a model: chosen once, by patterns, before the run; and its optimizer."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import jax
import optax
from jaxtyping import PyTree

from windlass.adapters import BaseAdapter, Peft, is_adapted, trained
from windlass.devices.axes import annotate, is_trainable
from windlass.errors import UserError
from windlass.hub.names import EMBEDDING
from windlass.hub.peft import whole_arrays
from windlass.layers.head import ScoreHead
from windlass.layers.names import first_match, named, refuse_idle
from windlass.layers.residual import Connection
from windlass.models import HEAD
from windlass.run import Run


class TrainableMask(NamedTuple):
    """A mask, True at each array that is trained, and how many parameters that is."""

    mask: PyTree
    trained: int
    total: int
    fixed: int  # of modules that declare them so, and integers: no pattern trains them


def of_run(arrays: PyTree, run: Run) -> TrainableMask:
    """The trainable part of a run: nothing, where its objective has no gradient."""
    if run.objective.has_gradient:
        table = run.architecture.names
        beside = [whole_arrays(arrays, x.whole, table) for x in run.adapter if isinstance(x, Peft)]
        _refuse_rows({one for each in beside for one in each}, run.adapter)
        return choose(arrays, run.train.trainable, {one for each in beside for one in each})
    whole = choose(arrays, None)
    return whole._replace(mask=jax.tree.map(lambda _: False, whole.mask), trained=0)


def optimizer(run: Run, steps: int, weights: PyTree) -> optax.GradientTransformationExtraArgs:
    """The optimizer of the trainable part, which may be abstract; of nothing it has no state."""
    if run.optim is None:
        return optax.with_extra_args_support(optax.identity())
    return run.optim.build(steps, weights)


def choose(
    arrays: PyTree, patterns: tuple[str, ...] | None, whole: Collection[str] = ()
) -> TrainableMask:
    """The arrays whose name matches a pattern, as `blocks.mlp.*` does `blocks.mlp.gate.weight`.

    Without patterns those that adapters declare, those they have `whole`, and those of residual
    connections and of scores, which no checkpoint has trained; without adapters, all. Fixed arrays
    are left out, and a pattern that matches nothing else is refused.
    """
    names, sizes = zip(*((one, x.size) for one, x in named(arrays)), strict=True)
    allowed = jax.tree.leaves(annotate(arrays, is_trainable))
    if patterns is None:
        added = _added(arrays) if is_adapted(arrays) else [True] * len(names)
        chosen = [a or one in whole for a, one in zip(added, names, strict=True)]
    else:
        refuse_idle("train.trainable", patterns, names, "weight")
        _refuse_fixed(patterns, dict(zip(names, allowed, strict=True)))
        chosen = [first_match(one, patterns) is not None for one in names]
    chosen = [a and b for a, b in zip(chosen, allowed, strict=True)]
    if not any(chosen):
        raise UserError(
            "nothing would be trained: no adapter here trains an array of its own; a key of it may "
            "change that, and train.trainable names what to train"
        )
    mask = jax.tree.unflatten(jax.tree.structure(arrays), chosen)
    return TrainableMask(mask, _sum(sizes, chosen), sum(sizes), sum(sizes) - _sum(sizes, allowed))


def _refuse_rows(whole: Collection[str], adapters: Iterable[BaseAdapter]) -> None:
    """Refuse a table of tokens that is trained whole, and in some rows as well."""
    for key, table in (("tokens", EMBEDDING), ("head_tokens", HEAD)):
        ids = [x for one in adapters for x in getattr(one, key, ())]
        if ids and table in whole:
            raise UserError(
                f"adapter.{key} is {ids}, and adapter.whole trains all rows of {table}; leave one "
                "of them out"
            )


def _added(arrays: PyTree) -> list[bool]:
    """Presence of each array in an adapter, a residual connection or scores that are trained."""

    def is_connection(node: PyTree) -> bool:
        return isinstance(node, Connection | ScoreHead)

    def connected(node: PyTree) -> PyTree:
        return jax.tree.map(lambda _: is_connection(node), node)

    masks = trained(arrays), jax.tree.map(connected, arrays, is_leaf=is_connection)
    return [a or b for a, b in zip(*map(jax.tree.leaves, masks), strict=True)]


def _refuse_fixed(patterns: tuple[str, ...], allowed: dict[str, bool]) -> None:
    """Refuse a pattern that matches only what is never trained."""
    for pattern in patterns:
        matched = [name for name in allowed if first_match(name, [pattern]) is not None]
        if not any(allowed[name] for name in matched):
            raise UserError(
                f"train.trainable: {pattern} matches only fixed arrays, which are never trained: "
                f"{', '.join(matched)}; leave it out, or name others"
            )


def _sum(sizes: tuple[int, ...], chosen: list[bool]) -> int:
    return sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
