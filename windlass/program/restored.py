"""The carry of a checkpoint, for those that use a run without training it."""

from pathlib import Path

import jax

from windlass.checkpoint import store
from windlass.checkpoint.fingerprint import named
from windlass.checkpoint.store import Identity
from windlass.objectives import Carry
from windlass.program.programs import Programs


def load_carry(programs: Programs, folder: Path, step: int, identity: Identity) -> Carry:
    """The carry of a run at a step, as it was stored: its rows may be those of another batch."""
    abstract = programs.abstract_carry()
    if not jax.tree.leaves(abstract):
        return abstract
    there = store.contents(folder, str(step))["arrays"]

    def stored(path: str, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = tuple(there[f"carry.{path}"]["shape"])
        place = programs.place(shape, path) if path.startswith("rows") else x.sharding
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=place)

    leaves = [stored(path, x) for path, x in named(abstract).items()]
    shapes = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return store.load(folder, {"carry": shapes}, identity, step=step).state["carry"]
