"""One checkpoint folder: arrays and a manifest that Orbax commits together, and their checking."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

from windlass import seal
from windlass.checkpoint import orbax_faults
from windlass.checkpoint.fingerprint import measure, named
from windlass.processes import hosts

UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax writes here, and commits by renaming
MANIFEST = "manifest/metadata"
TOGETHER = 2**28  # bytes of arrays that are in memory at once while a checkpoint is examined
LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes these while it commits

orbax_faults.mend()


class Damage(NamedTuple):
    """Damage: names of files and arrays that are not as they were written."""

    files: list[str]
    arrays: list[str]

    def __str__(self) -> str:
        parts = [("file", self.files), ("array", self.arrays)]
        return "; ".join(
            f"{kind}{'s' if len(names) > 1 else ''} {_some(names)}"
            for kind, names in parts
            if names
        )


class Damaged(Exception):
    """A checkpoint that is not what was saved."""

    def __init__(self, damage: Damage):
        super().__init__(str(damage))
        self.damage = damage


def writer(before_commit: Callable[[], None], *, locks_pages: bool) -> ocp.AsyncCheckpointer:
    """An Orbax checkpointer that calls back in its thread between the writing and the commit.

    Through page-locked memory arrays come off a GPU several times faster; but while that is
    allocated, for seconds of gigabytes, no other thread runs Python.
    """
    options = ocp.options.AsyncOptions(
        # Made in the background, a folder that cannot be made leaves Orbax waiting for 20 minutes.
        create_directories_asynchronously=False,
        post_finalization_callback=before_commit,
    )
    state = ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=None if locks_pages else False)
    handler = ocp.CompositeCheckpointHandler(state=state, manifest=ocp.JsonCheckpointHandler())
    return ocp.AsyncCheckpointer(handler, async_options=options)


def describe(tree: PyTree, **about: Any) -> dict:
    """The manifest of a tree: what the caller says about it, and each array with fingerprint."""
    prints = measure(tree)
    arrays = {
        name: {"shape": list(x.shape), "dtype": x.dtype.name, "fingerprint": prints[name]}
        for name, x in named(tree).items()
    }
    return {**about, "arrays": arrays}


def write(orbax: ocp.AsyncCheckpointer, folder: Path, tree: PyTree, manifest: dict) -> None:
    """Copy the arrays off the device, and let Orbax write them in the background."""
    items: dict[str, Any] = {"manifest": ocp.args.JsonSave(seal.signed(manifest))}
    # Orbax refuses arrays without elements, and trees without arrays.
    if arrays := {name: array for name, array in named(tree).items() if array.size}:
        items["state"] = ocp.args.PyTreeSave(arrays)
    orbax.save(folder.absolute(), args=ocp.args.Composite(**items))


def manifest(folder: Path) -> dict:
    """The manifest that `describe` made, or Damaged."""
    try:
        return seal.opened(folder / MANIFEST)
    except (ValueError, FileNotFoundError) as unreadable:
        raise Damaged(Damage([MANIFEST], [])) from unreadable


def agreed(folder: Path) -> dict:
    """The manifest as process 0 reads it, or Damaged on all processes."""

    def look() -> dict | None:
        try:
            return manifest(folder)
        except Damaged:
            return None

    content = hosts.broadcast("manifest", look)
    if content is None:
        raise Damaged(Damage([MANIFEST], []))
    return content


def examine(folder: Path) -> Damage:
    """Compare every byte of every file, and every array, with what was written.

    Nothing but the folder is needed: neither the model nor the devices it was written on. Arrays
    are read a few at a time, as much as `TOGETHER` says, and one by one where a file is damaged:
    Orbax closes its loop on all when it fails in one.
    """
    files = seal.broken(folder)
    try:
        expected = manifest(folder)["arrays"]
    except Damaged as damaged:
        return Damage(sorted({*files, *damaged.damage.files}), [])
    groups = _groups(expected, at_once=0 if files else TOGETHER)
    return Damage(files, [name for group in groups for name in _damaged(folder, group)])


def read(folder: Path, target: PyTree, expected: dict[str, dict]) -> PyTree:
    """Restore the arrays of an abstract pytree, each straight into its sharding, or raise Damaged.

    Only arrays the tree names are read; shape and dtype must be those of the manifest, which is
    what is `expected`. Of several processes the first alone looks at every file.
    """
    if files := hosts.broadcast("broken files", lambda: seal.broken(folder)):
        raise Damaged(Damage(files, []))
    abstract = named(target)
    restored = _restore(folder, abstract)
    prints = measure(restored)
    if wrong := [name for name in abstract if prints[name] != expected[name]["fingerprint"]]:
        raise Damaged(Damage([], wrong))
    return jax.tree.unflatten(jax.tree.structure(target), restored.values())


def _groups(expected: dict[str, dict], at_once: int) -> Iterator[dict[str, dict]]:
    """Groups of arrays that have elements, each of at most `at_once` bytes or of one array."""
    group, size = {}, 0
    for name, about in expected.items():
        bytes_here = math.prod(about["shape"]) * jnp.dtype(about["dtype"]).itemsize
        if group and size + bytes_here > at_once:
            yield group
            group, size = {}, 0
        if bytes_here:
            group[name] = about
            size += bytes_here
    if group:
        yield group


def _damaged(folder: Path, expected: dict[str, dict]) -> list[str]:
    item = {
        name: jax.ShapeDtypeStruct(about["shape"], jnp.dtype(about["dtype"]))
        for name, about in expected.items()
    }
    as_saved = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in expected}
    try:
        arrays = _orbax_read(folder, item, as_saved)
    except Exception:  # what Orbax raises for spoilt bytes: KeyError, ValueError, bare Exception
        if len(expected) == 1:
            return list(expected)
        return [name for one in expected for name in _damaged(folder, {one: expected[one]})]
    return [name for name, about in expected.items() if not _is_as_saved(name, arrays, about)]


def _is_as_saved(name: str, arrays: dict[str, Any], about: dict) -> bool:
    # Of an array that its own list of arrays does not name, Orbax returns the description.
    array = arrays.get(name)
    if not isinstance(array, np.ndarray):
        return False
    return measure({name: jnp.asarray(array)})[name] == about["fingerprint"]


def _restore(folder: Path, abstract: dict[str, Any]) -> dict[str, Array]:
    def sharding(array: Any) -> jax.sharding.Sharding:
        return array.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])

    stored = {name: array for name, array in abstract.items() if array.size}
    targets = {
        name: ocp.ArrayRestoreArgs(
            sharding=sharding(array), global_shape=array.shape, dtype=array.dtype
        )
        for name, array in stored.items()
    }
    restored = _orbax_read(folder, stored, targets) if stored else {}
    return {
        name: restored[name]
        if name in restored
        else jax.device_put(np.zeros(array.shape, array.dtype), sharding(array))
        for name, array in abstract.items()
    }


def _orbax_read(folder: Path, item: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        args = ocp.args.PyTreeRestore(item=item, restore_args=targets, partial_restore=True)
        return orbax.restore(folder.absolute() / "state", args=args)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
