"""Signatures: the shapes, dtypes, shardings and mesh of a program, and how two of them differ."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding

NAMED = 4  # changes in a message, of perhaps hundreds


class Leaf(NamedTuple):
    """Abstract value of an array: shape, dtype and sharding."""

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
        """Changes that a program compiled for `old` does not take; empty where it takes all."""
        changes = []
        if self.mesh != old.mesh:
            changes.append(f"mesh {_mesh(old.mesh)} -> {_mesh(self.mesh)}")
        for path in dict.fromkeys([*old.leaves, *self.leaves]):
            before, now = old.leaves.get(path), self.leaves.get(path)
            if before is None or now is None:
                changes.append(f"{path}: {_type(before)} -> {_type(now)}")
            else:
                changes += [f"{path}: {what}" for what in _changes(before, now)]
        return changes


def key(arguments: Any) -> Any:
    """Cache key: the same for calls that one program serves; cheap, since every call makes one."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(leaf, leaves)), jax.sharding.get_abstract_mesh()


def leaf(x: Any) -> Leaf:
    if isinstance(x, jax.Array):
        return Leaf(x.shape, x.dtype, x.sharding if x.committed else None)
    if isinstance(x, jax.ShapeDtypeStruct):
        return Leaf(x.shape, x.dtype, x.sharding)
    kind = jax.typeof(x)
    return Leaf(kind.shape, kind.dtype, None)


def summarize(changes: Sequence[str]) -> str:
    """Changes in a line, not all of them where there are many."""
    more = f" and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
    return "; ".join(changes[:NAMED]) + more


def _changes(old: Leaf, new: Leaf) -> list[str]:
    changes = []
    if old.shape != new.shape:
        changes.append(f"shape {old.shape} -> {new.shape}")
    if old.dtype != new.dtype:
        changes.append(f"dtype {old.dtype} -> {new.dtype}")
    if len(old.shape) == len(new.shape) and not _fits(old, new):
        places = _place(old.sharding), _place(new.sharding)
        if places[0] == places[1]:
            places = _place(old.sharding, whole=True), _place(new.sharding, whole=True)
        changes.append(f"sharding {places[0]} -> {places[1]}")
    return changes


def _fits(old: Leaf, new: Leaf) -> bool:
    """Test that an array, as it lies, may be passed to a program compiled for another."""
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
