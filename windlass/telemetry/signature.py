"""What a program is compiled for, and how one such thing differs from another."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding

NAMED = 4  # changes in a message, of perhaps hundreds


class Leaf(NamedTuple):
    """An array as the compiler knows it: what it is and where it lives."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None  # None: on the host, or free to be moved


@dataclass(frozen=True)
class Signature:
    """The arguments of a call by their paths, `batch['tokens']`, and the mesh that is set."""

    leaves: dict[str, Leaf]
    mesh: dict[str, int]

    @staticmethod
    def of(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Signature":
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        leaves = {
            name + jax.tree_util.keystr(path): leaf(x)
            for name, value in bound.items()
            for path, x in jax.tree.leaves_with_path(value)
        }
        return Signature(leaves, dict(jax.sharding.get_abstract_mesh().shape))

    def changes_from(self, old: "Signature") -> list[str]:
        """What a program compiled for `old` does not take; empty where it takes everything."""
        found = []
        if self.mesh != old.mesh:
            found.append(f"mesh {_mesh(old.mesh)} -> {_mesh(self.mesh)}")
        for path in dict.fromkeys([*old.leaves, *self.leaves]):
            before, now = old.leaves.get(path), self.leaves.get(path)
            if before is None or now is None:
                found.append(f"{path}: {_type(before)} -> {_type(now)}")
            else:
                found += [f"{path}: {what}" for what in _changes(before, now)]
        return found


def key(arguments: Any) -> Any:
    """The same for calls that one program serves; cheap, since it is asked for at every call."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(leaf, leaves)), jax.sharding.get_abstract_mesh()


def leaf(x: Any) -> Leaf:
    if isinstance(x, jax.Array):
        return Leaf(x.shape, x.dtype, x.sharding if x.committed else None)
    if isinstance(x, jax.ShapeDtypeStruct):
        return Leaf(x.shape, x.dtype, x.sharding)
    kind = jax.typeof(x)
    return Leaf(kind.shape, kind.dtype, None)


def told(changes: Sequence[str]) -> str:
    """Changes in a line, not all of them where there are many."""
    more = f" and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
    return "; ".join(changes[:NAMED]) + more


def _changes(old: Leaf, new: Leaf) -> list[str]:
    found = []
    if old.shape != new.shape:
        found.append(f"shape {old.shape} -> {new.shape}")
    if old.dtype != new.dtype:
        found.append(f"dtype {old.dtype} -> {new.dtype}")
    if len(old.shape) == len(new.shape) and not _fits(old, new):
        places = _place(old.sharding), _place(new.sharding)
        if places[0] == places[1]:
            places = _place(old.sharding, whole=True), _place(new.sharding, whole=True)
        found.append(f"sharding {places[0]} -> {places[1]}")
    return found


def _fits(old: Leaf, new: Leaf) -> bool:
    """Whether an array may be given to a program that was compiled for another, as it lies."""
    if new.sharding is None or new.sharding == old.sharding:
        return True
    if old.sharding is None:
        return new.sharding.is_fully_replicated
    return new.sharding.is_equivalent_to(old.sharding, len(new.shape))


def _place(sharding: Sharding | None, whole: bool = False) -> str:
    if sharding is None:
        return "none"
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    split = ", ".join(map(repr, sharding.spec))
    on = f" on {_mesh(dict(sharding.mesh.shape))} in {sharding.memory_kind} memory" if whole else ""
    return f"P({split}){on}"


def _type(x: Leaf | None) -> str:
    return "absent" if x is None else f"{x.dtype} {x.shape}"


def _mesh(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
