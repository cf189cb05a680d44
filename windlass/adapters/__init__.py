"""What is added to a model's linear maps. One file each; `adapter.kind` in a recipe is its name.

A file defines `Adapter`: a section with `adapt(model, names=..., key=...) -> model`, which puts an
`Adapted` in the place of each linear map that its patterns choose. `names` is the family's table of
names elsewhere, by which a map may be called too. No family knows that there are adapters.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from windlass.devices.axes import Placed
from windlass.layers.linear import Linear
from windlass.layers.names import first_match, name, refuse_idle
from windlass.layers.residual import Connection

Model = TypeVar("Model")

EVERY = "all-linear"  # PEFT's word for every linear map


class Adapted(Placed):
    """A linear map and what was added to it."""

    base: eqx.AbstractVar[Linear]  # as it was

    @abstractmethod
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]: ...

    @abstractmethod
    def merged(self) -> Linear:
        """One linear map that computes the same, in float32."""


@runtime_checkable
class Adapter(Protocol):
    def adapt(self, model: Model, *, names: Mapping[str, str], key: PRNGKeyArray) -> Model: ...


def merged(model: Model) -> Model:
    """The plain model that computes the same as an adapted one, in float32 where it was adapted."""

    def visit(node):
        if not isinstance(node, Adapted):
            return node
        merge = lambda one: one.merged()  # noqa: E731
        for _ in range(depth(node.base)):
            merge = eqx.filter_vmap(merge)
        return merge(node)

    return jax.tree.map(visit, model, is_leaf=_is_adapted)


def plain(model: Model) -> Model:
    """An adapted model as it was, its adapters off."""
    return jax.tree.map(
        lambda node: node.base if isinstance(node, Adapted) else node, model, is_leaf=_is_adapted
    )


def own(model: PyTree) -> PyTree:
    """True at each array of an adapter, False at those of the model it adapts."""

    def visit(node):
        if not isinstance(node, Adapted):
            return False
        mine, base = jax.tree.map(lambda _: True, node), jax.tree.map(lambda _: False, node.base)
        return eqx.tree_at(lambda one: one.base, mine, base)

    return jax.tree.map(visit, model, is_leaf=_is_adapted)


def depth(linear: Linear) -> int:
    """Along how many axes a map is stacked."""
    return linear.weight.ndim - len(linear.axes["weight"])


def chosen(model: Any, patterns: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The linear maps that patterns choose, by our names, of which some may be written as PEFT's.

    As `blocks.attention.*` chooses `blocks.attention.query`, so do `q_proj`, `self_attn.q_proj`.
    The maps of a residual connection are none of the model's, and are never chosen.
    """
    apart = (Linear, Connection)
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, apart))
    maps = dict.fromkeys(name(path) for path, node in found if _is_linear(node))
    called = {one: [one, EVERY, *_elsewhere(names.get(one))] for one in maps}
    words = [word for each in called.values() for word in each]
    idle = [p for p in patterns if all(first_match(word, [p]) is None for word in words)]
    short = dict.fromkeys(each[2] for each in called.values() if len(each) > 2)
    refuse_idle("adapter.targets", idle, [*maps, *short], "linear map")
    return [
        one
        for one, each in called.items()
        if any(first_match(word, patterns) is not None for word in each)
    ]


def _elsewhere(full: str | None) -> list[str]:
    """The last word of a name elsewhere, its last two, and so on up to the layer's number."""
    words = (full or "").rpartition("{layer}.")[2].split(".")
    return [".".join(words[-n:]) for n in range(1, len(words) + 1)] if full else []


def _is_linear(node: Any) -> bool:
    return isinstance(node, Linear)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, Adapted)
