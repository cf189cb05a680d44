"""A run to be exported: read on the CPU of this machine, whatever it was trained on."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from windlass import adapters
from windlass.checkpoint.fingerprint import named
from windlass.checkpoint.store import FROZEN, contents, load, load_frozen, saved
from windlass.data import vocabulary as vocabularies
from windlass.data.vocabulary import Vocabulary
from windlass.devices.mesh import Mesh
from windlass.devices.precision import Precision
from windlass.devices.selection import Chosen
from windlass.layers.names import named as listed
from windlass.program.built import Built
from windlass.program.described import Described
from windlass.run import Run
from windlass.run.batches import choice
from windlass.run_folder import folder as folders
from windlass.starting import origin
from windlass.starting.hugging_face import START
from windlass.telemetry.compile_cache import keep


class Source:
    """The model of a run, before it has any numbers in it, and where these are."""

    def __init__(self, folder: Path, weights: str, step: int | None):
        self.folder, self.place = folder, folders.place_of(folder, weights, step)
        self.built = Built(_described(folder))
        self.run = self.built.run

    @cached_property
    def step(self) -> int:
        """The step that is meant, which a damaged checkpoint may turn out not to have."""
        return saved(self.folder, self.place.step)[-1]

    @property
    def names(self) -> Mapping[str, str] | None:
        """The family's table of names elsewhere; None: its arrays have their own."""
        return self.built.names or None

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """As the run resolved it."""
        return folders.stored(self.folder)

    @property
    def start(self) -> dict[str, Any]:
        """What the run started from; empty where that is nothing.

        Of a run that goes on with the adapter of another, that is the model of both.
        """
        start = self.recipe.get("start") or {}
        return start if start.get("run") is None else self.came_with(START) or start

    @cached_property
    def beside_the_adapter(self) -> list[str]:
        """The weights of the model itself that a run with an adapter trained."""
        mask, own = self.built.trainable.mask, adapters.own(self.built.abstract)
        both = zip(listed(mask), jax.tree.leaves(own), strict=True)
        return [name for (name, is_trained), is_own in both if is_trained and not is_own]

    def came_with(self, name: str) -> dict[str, Any] | None:
        """What a file of the model that the run started from said."""
        path = self.folder / folders.MODEL / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def dtype(self) -> str:
        """That of the files the run started from; float32 where it began from nothing."""
        about = self.came_with("config.json") or {}
        return about.get("dtype") or about.get("torch_dtype") or "float32"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabularies.load(str(self.folder / folders.TOKENIZER))

    @property
    def abstract(self) -> Any:
        return eqx.combine(self.built.abstract, self.built.static)

    def load(self, say: Callable[[str], None], *, whole: bool = True) -> tuple[int, Any]:
        """The step that was found good, and the model with its numbers, of the types it has.

        Unless it is to be whole, what was not trained stays abstract.
        """
        built, place = self.built, self.place
        weights, rest = built.parted(built.abstract)
        restored = load(
            self.folder, {place.part: weights}, built.identity, say=say, step=place.step
        )
        frozen = rest
        if whole and jax.tree.leaves(rest):
            kept = _as_stored({"model": rest}, contents(self.folder, FROZEN)["arrays"])
            frozen = load_frozen(self.folder, kept, built.identity, part=True)["model"]
        return restored.step, eqx.combine(restored.state[place.part], frozen, built.static)


def _described(folder: Path) -> Described:
    layers = origin.load(folder / folders.RECIPE, [f"run.dir={folder}"])
    recipe = layers.read(Run, None)
    run = dataclasses.replace(recipe, mesh=Mesh(), precision=Precision(compute="float32"))
    here = Chosen("cpu", 1, "cpu", [], [])
    alone = choice(run, 1)
    return Described(layers, run, here, jax.devices("cpu")[:1], alone, [], keep())


def _as_stored(tree: PyTree, stored: dict[str, dict]) -> PyTree:
    """An abstract tree in the types that its arrays were written in, which differ by device."""
    found = [
        jax.ShapeDtypeStruct(
            x.shape, stored.get(path, {}).get("dtype", x.dtype), sharding=x.sharding
        )
        for path, x in named(tree).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), found)
