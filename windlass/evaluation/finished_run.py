"""A finished run, opened for use: recipe, built model, vocabulary, weights of a checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Int, PyTree

from windlass import models
from windlass.checkpoint.store import Identity, chosen_step, load, load_frozen, reading
from windlass.data import vocabulary as vocabularies
from windlass.data.vocabulary import Vocabulary
from windlass.devices.mesh import Mesh
from windlass.devices.precision import Precision
from windlass.devices.selection import DeviceChoice
from windlass.hub.config import language, mapping
from windlass.objectives import Carry
from windlass.program.built import Built, model_identity
from windlass.program.described import Described
from windlass.program.programs import Programs, solves
from windlass.program.restored import load_carry
from windlass.program.step import Frozen
from windlass.run import Run
from windlass.run.batches import choice
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.run_folder.folder import WeightsAt
from windlass.starting import origin
from windlass.starting.describe import describe
from windlass.starting.hugging_face import START
from windlass.telemetry.compile_cache import keep

T = TypeVar("T")


class Loaded(NamedTuple):
    """The arrays of a checkpoint that was verified."""

    step: int
    weights: PyTree  # as they are trained: the last, or their average
    frozen: Frozen
    carry: Carry
    identity: Identity  # that it was written with

    def with_helpers(self, helpers: dict[str, PyTree]) -> "Loaded":
        """With the models that the objective names, for an evaluation."""
        return self._replace(frozen=self.frozen._replace(helpers=helpers))

    @property
    def arguments(self) -> tuple[PyTree, Frozen, Carry, Int[Array, ""]]:
        """Arguments of an evaluation program."""
        return self.weights, self.frozen, self.carry, jax.numpy.int32(self.step)


class FinishedRun:
    """The abstract model of a run, and where its arrays are.

    Nothing is read before `load` or `model`, which are to be called in the run's `scope`.
    """

    def __init__(self, folder: Path, place: Callable[[], WeightsAt], described: Described):
        self.folder, self.built = folder, Built(described)
        self.run = self.built.run
        self._place = place  # asked anew each time: the run may be training meanwhile

    @property
    def part(self) -> str:
        """Part of the state whose weights are used: `weights`, or `ema`, their average."""
        return self._place().part

    def scope(self) -> AbstractContextManager:
        return self.built.described.scope()

    @cached_property
    def programs(self) -> Programs:
        return Programs(self.built, steps=1)  # none of which depends on how many there are

    def reading(self, read: Callable[[int], T]) -> T:
        """The result of `read` for the step requested, whose checkpoint stays there meanwhile."""
        return reading(self.folder, lambda: chosen_step(self.folder, self._place().step), read)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe as the run resolved it."""
        return folders.stored(self.folder)

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Vocabulary of the tokens; None where the run was trained on blocks without one."""
        own = self.folder / folders.TOKENIZER
        if self.run.data.has_blocks and not own.is_dir():
            return None
        return vocabularies.load(str(own), self.run.tokenizer.eos)

    @property
    def names(self) -> Mapping[str, str]:
        """The family's table of Hugging Face names; of one that only Windlass has it is empty."""
        return self.built.names

    @property
    def has_hugging_face_form(self) -> bool:
        """Presence of a Hugging Face equivalent, once adapters are merged."""
        return bool(self.names) and self.run.residual.is_plain

    @property
    def abstract(self) -> Any:
        return eqx.combine(self.built.abstract, self.built.static)

    @property
    def start(self) -> dict[str, Any]:
        """Starting point of the run, a section; empty where it began from random weights.

        Of a run that goes on with the adapter of another, that is the model of both.
        """
        start = self.recipe.get("start") or {}
        return start if start.get("run") is None else self.came_with(START) or start

    def came_with(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the published model that the run started from; None: it has none."""
        path = self.folder / folders.MODEL / name
        return mapping(path) if path.is_file() else None

    @property
    def dtype(self) -> str:
        """Dtype of the files the run started from; float32 where it began from nothing."""
        about = language(self.came_with("config.json") or {})
        return about.get("dtype") or about.get("torch_dtype") or "float32"

    @property
    def context_length(self) -> int:
        """Context length: that of the published model, or else of the training sequences."""
        return context_length(self.run, self.came_with("config.json"))

    def load(
        self,
        *,
        identity: Identity | None = None,
        frozen: bool = True,
        as_stored: bool = False,
    ) -> Loaded:
        """The arrays of the checkpoint, each in its sharding, or a refusal.

        `identity` is what the checkpoint must agree on, beside the model. Without `frozen`, arrays
        that were not trained stay abstract; `as_stored` keeps their dtype, which differs by device.
        """
        weights, rest = self.built.parted(self.built.abstract)
        trained = models.as_trained(self.run.model, self.recipe.get("model") or {})
        kept = {"model": model_identity(trained)}
        part, own = self._place().part, self.built.identity | kept
        expected = own | (identity or {}) | kept

        def read(step: int) -> Loaded:
            restored = load(self.folder, {part: weights}, expected, step=step)
            unchanged = rest
            if frozen and jax.tree.leaves(rest):
                stored = {"model": rest}
                stored = load_frozen(self.folder, stored, own, part=True, as_stored=as_stored)
                unchanged = stored["model"]
            carry = load_carry(self.programs, self.folder, step, own)
            arrays = restored.state[part], Frozen(unchanged, {}), carry
            return Loaded(step, *arrays, restored.identity)

        return self.reading(read)

    def model(self) -> Any:
        """The model as it computes; what the objective solves for is solved."""
        return self.built.model(*self._solved(self.load()))

    def used(self) -> tuple[int, PyTree, PyTree]:
        """The step, and the arrays to use, trained and frozen."""
        loaded = self.load()
        return loaded.step, *self._solved(loaded)

    def stored_model(self, *, frozen: bool = True) -> tuple[Loaded, Any]:
        """The checkpoint, and the same model with its arrays in the dtypes they were written in."""
        frozen = frozen or solves(self.run.objective)
        loaded = self.load(frozen=frozen, as_stored=True)
        return loaded, self.built.whole(*self._solved(loaded))

    def _solved(self, loaded: Loaded) -> tuple[PyTree, PyTree]:
        return self.programs.finish(loaded.weights, loaded.frozen.model, loaded.carry)


def context_length(run: Run, published: Mapping[str, Any] | None) -> int:
    """Context length by the config.json of the published model, or else the training sequences."""
    return language(published or {}).get("max_position_embeddings") or run.data.length


def open_run(
    run: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    weights: str = "last",
    step: int | None = None,
) -> FinishedRun:
    """A run on the devices that its recipe or the overrides request."""
    folder = runs.find(run)
    place = _place(folder, weights, step)
    keys = [f"run.dir={folder}", *overrides]
    return FinishedRun(folder, place, describe(folder / folders.RECIPE, keys, is_trained=False))


def open_on_cpu(run: str | Path | None, *, weights: str, step: int | None) -> FinishedRun:
    """A run on one CPU in float32, whatever it was trained on."""
    folder = runs.find(run)
    place = _place(folder, weights, step)
    layers = origin.load(folder / folders.RECIPE, [f"run.dir={folder}"])
    recipe = dataclasses.replace(
        layers.read(Run, None), mesh=Mesh(), precision=Precision(compute="float32")
    )
    here = DeviceChoice("cpu", 1, "cpu", [], [])
    devices, alone = jax.devices("cpu")[:1], choice(recipe, 1)
    return FinishedRun(folder, place, Described(layers, recipe, here, devices, alone, [], keep()))


def _place(folder: Path, weights: str, step: int | None) -> Callable[[], WeightsAt]:
    folders.place_of(folder, weights, step)  # what cannot be is refused before anything is built
    return partial(folders.place_of, folder, weights, step)
