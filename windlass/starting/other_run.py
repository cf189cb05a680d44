"""Another run as the start of this one: its model, tokenizer and weights."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from windlass import adapters, config
from windlass.adapters import Adapted
from windlass.checkpoint import store
from windlass.checkpoint.fingerprint import named
from windlass.config import Layers, listing, tree
from windlass.config.start import Start
from windlass.data.tokenizer import Tokenizer
from windlass.devices.axes import annotate
from windlass.errors import UserError
from windlass.program.built import Built
from windlass.program.described import Described
from windlass.program.programs import Programs, solves
from windlass.program.restored import load_carry
from windlass.run import Run
from windlass.run.batches import without_batch
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.starting import adapter, hugging_face
from windlass.starting.four_bit_weights import BaseWeights

T = TypeVar("T")
SHOWN = 8  # arrays in a refusal
# The sections that a run goes on with when the run that they came from is gone.
SECTIONS = ("model", "start", "residual", "tokenizer", "adapter")


def resolve(start: Start, layers: Layers, *, key: str = "model") -> dict[str, Any]:
    """The sections that another run stands for in a recipe."""
    try:
        folder = runs.find(start.run)
    except UserError as unknown:
        if (recipe := _descendant(start, layers)) is None:
            raise UserError(f"{key}.run: {unknown}") from None
        return {key: recipe.get(key) for key in SECTIONS}
    recipe = folders.stored(folder)
    tokenizer = folders.tokenizer(folder, config.read(Tokenizer, recipe["tokenizer"]))
    if tokenizer.kind == "bpe":  # from the corpus of this run it would learn another one
        tokenizer = Tokenizer(kind="file", path=str(folder / folders.TOKENIZER))
    written_out: dict[str, Any] = {"run": str(folder), "weights": start.which}
    base = tree(start.base) if start.base else (recipe.get("start") or {}).get("base")
    if base is not None and key == "model":
        written_out["base"] = base
    sections = {"model": recipe["model"], "start": written_out, "tokenizer": tree(tokenizer)}
    if recipe.get("residual") is not None:
        sections["residual"] = recipe["residual"]
    return sections | adapter.resolve(recipe.get("adapter"), layers)


def keep(start: Start, folder: Path, ours: tuple) -> None:
    """Keep what the other run kept of the published model that it began with, if it did.

    Which model that was is kept too where `ours`, the adapters here, are trained beside the same.
    """
    other = runs.find(start.run)
    recipe, model = folders.stored(other), other / folders.MODEL
    theirs, trained = recipe.get("adapter"), recipe["train"].get("trainable")
    is_same = bool(ours) and trained is None and adapter.shared(theirs, ours) == len(ours)
    if model.is_dir():
        leave = None if is_same else shutil.ignore_patterns(hugging_face.START)
        shutil.copytree(model, folder / folders.MODEL, ignore=leave, dirs_exist_ok=True)


def _descendant(start: Start, layers: Layers) -> dict[str, Any] | None:
    """The recipe of the run that is to go on, once the one it started from is gone."""
    recipes = {folder: folders.stored(folder) for folder in runs.of_recipe(layers)}
    matches = {folder: one for folder, one in recipes.items() if is_of(one.get("start"), start)}
    if len(matches) > 1:
        raise UserError(
            f"model.run is {start.run}, which is gone, and {listing(matches, 'and')} started from "
            "it; run.dir says which of them goes on"
        )
    return next(iter(matches.values()), None)


def is_of(written: dict[str, Any] | None, start: Start) -> bool:
    """Return True if a section `start`, as it is written out, is of this other run."""
    if not written or not written.get("run") or written["weights"] != start.which:
        return False
    folder = Path(written["run"])
    return start.run in (str(folder), folder.name, folder.name.rpartition("-")[0])


def check(start: Start, key: str = "model") -> tuple[Path, folders.WeightsAt]:
    """The run and the checkpoint with the weights, or a refusal; `key` names them."""
    try:
        folder = runs.find(start.run)
    except UserError as unknown:
        raise UserError(f"{key}.run: {unknown}") from None
    if not store.steps_in(store.folder_of(folder)):
        raise UserError(f"{key}.run is {start.run}, which has no checkpoint yet")
    return folder, folders.place_of(folder, start.which)


def take(
    start: Start, built: Any, vocabulary: str, say: Callable[[str], None]
) -> tuple[dict[int, dict[str, Array]], dict[str, Adapted], list[tuple[str, str]]]:
    """The weights of another run whose path and shape are those of a built model's, and facts.

    Adapters that this run has too, in the same order, go on; others are merged into their base, and
    given by path as well, for an adapter here that starts from one of them.
    `vocabulary` is what a checkpoint says of this run's tokenizer.
    """
    folder, place = check(start)
    return _reading(folder, place, lambda stored: _taken(stored, start, built, vocabulary, say))


def _taken(
    stored: "_Stored", start: Start, built: Any, vocabulary: str, say: Callable[[str], None]
) -> tuple[dict[int, dict[str, Array]], dict[str, Adapted], list[tuple[str, str]]]:
    folder, base = stored.folder, BaseWeights(built.stages[0])
    stage = adapter.shared(folders.stored(folder).get("adapter"), built.run.adapter)
    is_same = stored.recipe.base == built.run.base
    if not is_same and (stage or stored.recipe.base):
        stage = None  # matrices are what the two have in common
    merges, model = stage is None, built.stages[stage or 0] if is_same else base.plain
    model = base.plain if merges else model
    which = f"{start.which} weights{', the adapter merged' * merges}"
    computed, others = {}, {}
    if merges or stored.is_solved:
        computed, others = stored.computed(built.described, merges=merges)
    here, known = named(model), computed or stored.arrays
    fits = [path for path in here if path in known and _shape(known, path) == _shape(here, path)]
    if not fits:
        raise UserError(_no_match(folder, here, known))
    _check_vocabulary(folder, stored.tokenizer, vocabulary, model, fits, say)
    if computed:
        arrays = base.converted({path: computed[path] for path in fits})
    elif is_same:
        arrays = stored.read({path: here[path] for path in fits})
    else:
        each = (base.converted(stored.read({path: here[path]})) for path in fits)
        arrays = {path: x for one in each for path, x in one.items()}
    facts = [("start", f"{folder} at step {stored.step}, {which}")]
    return {stage or 0: arrays}, others, [*facts, *_listed(fits, here, known), *base.facts()]


def whole(
    folder: Path, place: folders.WeightsAt, described: Described
) -> tuple[int, dict[str, Array]]:
    """The step and the plain model of another run, by path, on the mesh of one that is described.

    Its adapter is merged, and solved is what its objective solves for.
    """

    def read(stored: _Stored) -> tuple[int, dict[str, Array]]:
        merges = bool(stored.recipe.adapter or stored.recipe.base)
        return stored.step, stored.computed(described, merges=merges)[0]

    return _reading(folder, place, read)


def _reading(folder: Path, place: folders.WeightsAt, read: Callable[["_Stored"], T]) -> T:
    """The result of `read` for a checkpoint of a run, which may be training meanwhile."""
    return store.reading(
        folder,
        lambda: store.chosen_step(folder, place.step),
        lambda step: read(_Stored.of(folder, step, place.part)),
    )


class _Stored(NamedTuple):
    """The arrays of another run, as its manifests have them."""

    folder: Path
    step: int
    part: str  # of the state
    trained: dict[str, dict]
    frozen: dict[str, dict]
    tokenizer: str  # what its checkpoint says of it

    @staticmethod
    def of(folder: Path, step: int, part: str) -> "_Stored":
        manifest = store.contents(folder, str(step))
        trained, frozen = _below(part, manifest["arrays"]), {}
        if (store.folder_of(folder) / store.FROZEN).exists():
            frozen = _below("model", store.contents(folder, store.FROZEN)["arrays"])
        return _Stored(folder, step, part, trained, frozen, manifest["identity"]["tokenizer"])

    @property
    def is_solved(self) -> bool:
        """Return True if the run uses other weights than those that it trains."""
        return solves(self.recipe.objective)

    @property
    def recipe(self) -> Run:
        return config.load(self.folder / folders.RECIPE).read(Run, None)

    @property
    def arrays(self) -> dict[str, dict]:
        return self.trained | self.frozen

    def read(self, here: dict[str, Any]) -> dict[str, Array]:
        """The arrays of these paths, each where it is to live."""

        def shapes(of: dict[str, dict]) -> dict[str, jax.ShapeDtypeStruct]:
            # As it is stored: it is compared with its fingerprint before it is cast.
            return {
                path: jax.ShapeDtypeStruct(x.shape, of[path]["dtype"], sharding=x.sharding)
                for path, x in here.items()
                if path in of
            }

        state = {self.part: shapes(self.trained)}
        restored = store.load(self.folder, state, {}, step=self.step)
        arrays = dict(restored.state[self.part])
        if frozen := shapes(self.frozen):
            arrays |= store.load_frozen(self.folder, {"model": frozen}, {}, part=True)["model"]
        return arrays

    def computed(
        self, described: Described, *, merges: bool
    ) -> tuple[dict[str, Array], dict[str, Adapted]]:
        """The weights as the run uses them: solved, and with its adapter merged.

        Maps whose matrix an adapter dropped are given by path as well, as they were.
        """
        theirs = without_batch(self.recipe)
        alike = replace(described, run=theirs, began=None, divided=None)
        programs = Programs(Built(alike), steps=1)
        built = programs.built
        arrays = self.read(named(built.abstract))
        leaves = [arrays[path] for path in named(built.abstract)]
        model = jax.tree.unflatten(jax.tree.structure(built.abstract), leaves)
        carry = load_carry(programs, self.folder, self.step, {})
        model = eqx.combine(*programs.finish(*built.parted(model), carry), built.static)
        others = adapters.standing_in(model) if merges else {}
        if merges:
            model = eqx.filter_jit(adapters.merged)(model)
        return named(eqx.filter(model, eqx.is_array)), others


def _listed(fits: list[str], here: dict[str, Any], known: dict[str, Any]) -> Iterator:
    size = sum(here[path].size for path in fits)
    is_whole = len(fits) == len(here) == len(known)
    names = ", ".join(dict.fromkeys(map(_name, fits)))
    yield "loaded", f"all {size:,} parameters" if is_whole else f"{size:,} parameters: {names}"
    for path in known:
        if path not in here:
            yield "not used", f"{_name(path)} {_shape(known, path)}: absent here"
    for path in here:
        if path not in fits:
            other = f"{_shape(known, path)} there" if path in known else "absent there"
            yield "new", f"{_name(path)} {_shape(here, path)}: {other}"


def _check_vocabulary(
    folder: Path,
    there: str,
    here: str,
    model: PyTree,
    fits: list[str],
    say: Callable[[str], None],
) -> None:
    if there == here:
        return
    has_vocab_axis = named(annotate(model, lambda x, about: jax.numpy.bool("vocab" in about.axes)))
    wrong = [_name(path) for path in fits if has_vocab_axis[path]]
    what = f"the tokenizer of {folder} is {there}, that of this run is {here}"
    if wrong:
        raise UserError(
            f"{what}: to {listing(wrong, 'and')} they are other tokens. Without a tokenizer "
            f"section that of {folder} is used; with another model.vocab these are initialized anew"
        )
    say(f"{what}: embedding and head are initialized anew")


def _no_match(folder: Path, here: dict[str, Any], known: dict[str, Any]) -> str:
    lines = [
        f"  {_name(path)}  is {_shape(known, path) if path in known else 'absent'} there "
        f"and {_shape(here, path) if path in here else 'absent'} here"
        for path in here | known
    ]
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([f"no weight of {folder} fits this model:", *lines[:SHOWN], *more])


def _below(part: str, arrays: dict[str, dict]) -> dict[str, dict]:
    start = f"{part}."
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}


def _shape(arrays: dict[str, Any], path: str) -> list[int]:
    one = arrays[path]
    return list(one["shape"] if isinstance(one, dict) else one.shape)


def _name(path: str) -> str:
    """A path as a recipe names it: the kinds of a stack do not show."""
    return re.sub(r"\bkinds\.\d+\.", "", path)
