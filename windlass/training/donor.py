"""Another run that lends: its model and tokenizer to a recipe, its weights to step 0."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, PyTree

from windlass import config
from windlass.checkpoint import store
from windlass.checkpoint.fingerprint import named
from windlass.config import Layers, listing, tree
from windlass.data.tokenizer import Tokenizer
from windlass.devices.axes import annotate
from windlass.errors import UserError
from windlass.run import Start
from windlass.training import folder as folders
from windlass.training import runs

SHOWN = 8  # arrays in a refusal


def lend(start: Start, layers: Layers) -> dict[str, Any]:
    """What the other run lends to a recipe."""
    try:
        folder = runs.find(start.run)
    except UserError as unknown:
        if (recipe := _descendant(start, layers)) is None:
            raise UserError(f"model.run: {unknown}") from None
        return {key: recipe[key] for key in ("model", "start", "tokenizer")}
    recipe = folders.stored(folder)
    tokenizer = folders.vocabulary(folder, config.read(Tokenizer, recipe["tokenizer"]))
    if tokenizer.kind == "bpe":  # from the corpus of this run it would learn another one
        tokenizer = Tokenizer(kind="file", path=str(folder / folders.TOKENIZER))
    written_out = {"run": str(folder), "weights": start.which}
    return {"model": recipe["model"], "start": written_out, "tokenizer": tree(tokenizer)}


def keep(start: Start, folder: Path) -> None:
    """Keep what the other run kept of the published model that it began with, if it did."""
    theirs = runs.find(start.run) / folders.MODEL
    if theirs.is_dir():
        shutil.copytree(theirs, folder / folders.MODEL, dirs_exist_ok=True)


def _descendant(start: Start, layers: Layers) -> dict[str, Any] | None:
    """The recipe of the run that is to go on, once the one it started from is gone."""
    recipes = {folder: folders.stored(folder) for folder in runs.of_recipe(layers)}
    found = {folder: one for folder, one in recipes.items() if _is_of(one.get("start"), start)}
    if len(found) > 1:
        raise UserError(
            f"model.run is {start.run}, which is gone, and {listing(found, 'and')} started from "
            "it; run.dir says which of them goes on"
        )
    return next(iter(found.values()), None)


def _is_of(written: dict[str, Any] | None, start: Start) -> bool:
    if not written or not written.get("run") or written["weights"] != start.which:
        return False
    folder = Path(written["run"])
    return start.run in (str(folder), folder.name, folder.name.rpartition("-")[0])


def check(start: Start) -> tuple[Path, folders.Place]:
    """Where the weights are, or a refusal."""
    folder = runs.find(start.run)
    if not store.steps_in(store.folder_of(folder)):
        raise UserError(f"model.run is {start.run}, which has no checkpoint yet")
    return folder, folders.place_of(folder, start.which)


def take(
    start: Start, model: PyTree, vocabulary: str, say: Callable[[str], None]
) -> tuple[dict[str, Array], list[tuple[str, str]]]:
    """The weights of another run whose path and shape are those of an abstract model's.

    Each by its path, and what is to be said of them all.

    `vocabulary` is what a checkpoint says of this run's tokenizer.
    """
    folder, (step, part) = check(start)
    newest = store.steps_in(store.folder_of(folder))[-1]
    manifest = store.contents(folder, str(newest if step is None else step))
    there = _below(part, manifest["arrays"])
    frozen = {}
    if (store.folder_of(folder) / store.FROZEN).exists():
        frozen = _below("model", store.contents(folder, store.FROZEN)["arrays"])
    here, known = named(model), there | frozen
    fits = [path for path in here if path in known and _shape(known, path) == _shape(here, path)]
    if not fits:
        raise UserError(_nothing(folder, here, known))
    _check_vocabulary(folder, manifest["identity"]["tokenizer"], vocabulary, model, fits, say)

    def wanted(of: dict[str, dict]) -> dict[str, jax.ShapeDtypeStruct]:
        # As it is stored: it is compared with its fingerprint before it is cast.
        return {
            path: jax.ShapeDtypeStruct(
                here[path].shape, of[path]["dtype"], sharding=here[path].sharding
            )
            for path in fits
            if path in of
        }

    restored = store.load(folder, {part: wanted(there)}, {}, say=say, step=step)
    arrays = dict(restored.state[part])
    if kept := wanted(frozen):
        arrays |= store.load_frozen(folder, {"model": kept}, {}, part=True)["model"]
    source = ("start", f"{folder} at step {restored.step}, {start.which} weights")
    return arrays, [source, *_listed(fits, here, known)]


def _listed(fits: list[str], here: dict[str, Any], known: dict[str, Any]) -> Iterator:
    size = sum(here[path].size for path in fits)
    names = ", ".join(dict.fromkeys(map(_name, fits)))
    yield "taken", f"{size:,} parameters: {names}"
    for path in known:
        if path not in here:
            yield "left out", f"{_name(path)} {_shape(known, path)}: it is not here"
    for path in here:
        if path not in fits:
            other = f"it is {_shape(known, path)} there" if path in known else "it is not there"
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
    by_token = named(annotate(model, lambda x, about: jax.numpy.bool("vocab" in about.axes)))
    wrong = [_name(path) for path in fits if by_token[path]]
    what = f"the tokenizer of {folder} is {there}, that of this run is {here}"
    if wrong:
        raise UserError(
            f"{what}: to {listing(wrong, 'and')} they are other tokens. Without a tokenizer "
            f"section that of {folder} is taken; with another model.vocab these start anew"
        )
    say(f"{what}: what is learned of each token starts anew")


def _nothing(folder: Path, here: dict[str, Any], known: dict[str, Any]) -> str:
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
