"""Frozen models that an objective names, its helpers, such as a teacher: found, checked, loaded.

A run stores none of their weights. It stores which they are, and reads them again at each start.
"""

import hashlib
import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import jax
from jaxtyping import Array, PyTree

from windlass import models
from windlass.checkpoint import store
from windlass.checkpoint.fingerprint import named
from windlass.config import Layers, section
from windlass.config.reading import attempt
from windlass.config.start import Start
from windlass.data import vocabulary as vocabularies
from windlass.data.teacher import Teacher
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.hub import fetch
from windlass.hub import weights as files
from windlass.processes import hosts, shared_folders
from windlass.program.built import Built
from windlass.run import OBJECTIVES, Run
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.starting import hugging_face, other_run

CACHED = "cached_teacher"  # the helper of `windlass teach`
KEYS = {CACHED: "data.teacher.model"}  # of helpers that no objective names


@section
class _Objective:
    """The part of a recipe that names helpers."""

    objective: Annotated[Any, OBJECTIVES] = field(default_factory=OBJECTIVES.load("next_token"))


def written_out(layers: Layers) -> Layers:
    """A recipe with a section `helpers`: of each, the config of its model and where it is.

    Those that are written there already stay, so that a run goes on with what it began with.
    """
    recipe = layers.merged(None)
    parsed, problems = attempt(_Objective, {"objective": recipe.get("objective")})
    if problems:  # reported with those of the other sections
        return layers
    missing = {
        name: start
        for name, start in parsed.objective.helpers.items()
        if _written(recipe, name, start) is None
    }
    new = {name: resolve(name, start, layers) for name, start in missing.items()}
    return layers.upon({"helpers": new}, instead_of={"helpers": (*new,)}) if new else layers


def resolve(name: str, start: Start, layers: Layers) -> dict[str, Any]:
    """The config and the origin of a helper; of one that is gone, as a run of the recipe has it."""
    if start.base is not None:
        raise UserError(
            f"{key(name)}.base is {start.base.kind}; a base in 4 bits is of the model that is "
            "trained, or of files that have it: leave it out"
        )
    recipes = [folders.stored(folder) for folder in runs.of_recipe(layers)]
    known = [one for recipe in recipes if (one := _written(recipe, name, start))]
    if start.hub is not None and known:  # a branch may have moved on meanwhile
        return known[-1]
    try:
        sections = _origin(start, layers, key(name))
    except UserError:
        if not known:
            raise
        return known[-1]
    return {part: sections[part] for part in ("model", "residual", "start") if sections.get(part)}


def _origin(start: Start, layers: Layers, key: str) -> dict[str, Any]:
    if start.run is not None:
        return other_run.resolve(start, layers, key=key)
    return hugging_face.resolve(start, layers, (), has_tokenizer=True, key=key)


def _written(recipe: dict[str, Any], name: str, start: Start) -> dict[str, Any] | None:
    """A helper as a recipe has it written out, where it is of this origin."""
    helper = (recipe.get("helpers") or {}).get(name)
    if helper is None or not _is_of(helper["start"], start):
        return None
    return helper


def _is_of(written: dict[str, Any], start: Start) -> bool:
    if start.run is not None:
        return other_run.is_of(written, start)
    if start.hub is None:
        return written.get("path") == start.path
    return written.get("hub") == start.hub and start.revision in (None, written.get("revision"))


def key(name: str) -> str:
    """Key of a helper in a recipe."""
    return KEYS.get(name, f"objective.{name}")


def check(run: Run) -> None:
    """Check that the weights of all helpers are there, before anything that takes long."""
    for name, helper in run.helpers.items():
        if helper.start.hub is None:
            _folder(helper.start, key(name))
            continue
        shared_folders.once(
            f"downloading the weights of {key(name)}",
            fetch.place(),
            lambda start=helper.start, name=name: hugging_face.weights(start, key(name)),
        )


def identity(run: Run) -> dict[str, str]:
    """Identity of the helpers' weights, for a checkpoint to agree on: a commit, or a hash."""
    return {
        key(name): hosts.broadcast(
            f"what {key(name)} is", lambda start=helper.start, name=name: _content(start, key(name))
        )
        for name, helper in run.helpers.items()
    }


def content_of_teacher(teacher: Teacher) -> str | None:
    """Identity of the teacher that wrote a cache; None: none is named, or it is gone."""
    if (start := teacher.model) is None:
        return None

    def look() -> str | None:
        try:
            return _content(start, key(CACHED))
        except UserError:  # only `windlass teach` needs it
            return None

    return hosts.broadcast("what the teacher is", look)


def take(
    built: Built, vocabulary: Vocabulary | None
) -> tuple[dict[str, PyTree], list[tuple[str, str]]]:
    """The arrays of each helper where they live, in the precision they compute in, and facts.

    `vocabulary` is that of this run, which must be theirs too; None: rows have no tokens.
    """
    trees, facts = {}, []
    if vocabulary is not None:
        check_vocabulary(built.run, vocabulary)
    for name, helper in built.run.helpers.items():
        arrays, origin = _arrays(built, name, helper.start)
        like = built.helpers[name].arrays
        leaves = [arrays[path].astype(x.dtype) for path, x in named(like).items()]
        trees[name] = jax.tree.unflatten(jax.tree.structure(like), leaves)
        size = sum(x.size for x in leaves)
        facts.append((name, f"{size:,} frozen parameters of {origin}"))
    return trees, facts


def _arrays(built: Built, name: str, start: Start) -> tuple[dict[str, Array], str]:
    if start.run is None:
        abstract, config = built.helpers[name].arrays, built.run.helpers[name].model
        arrays, (origin, *_) = hugging_face.take(start, abstract, models.names(config), key(name))
        return arrays, origin[1]
    folder, place = other_run.check(start, key(name))
    step, arrays = other_run.whole(folder, place, built.described)
    return arrays, f"{folder} at step {step}"


def _folder(start: Start, key: str) -> Path:
    """The folder with the weights, or a refusal."""
    if start.run is not None:
        return other_run.check(start, key)[0]
    return hugging_face.weights(start, key)


def _content(start: Start, key: str) -> str:
    if start.hub is not None:
        return f"{start.hub} at {(start.revision or '')[:12]}"
    if start.run is None:
        return f"of files with hash {_hash_of_files(hugging_face.weights(start, key))}"
    folder, (step, part) = other_run.check(start, key)
    step = store.steps_in(store.folder_of(folder))[-1] if step is None else step
    return f"of step {step} with hash {_hash_of_arrays(folder, step, part)}"


def _hash_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in files.files(folder):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]


def _hash_of_arrays(folder: Path, step: int, part: str) -> str:
    """Hash of the fingerprints that the checkpoint of a run has of its arrays."""
    stored = {
        name: about
        for name, about in store.contents(folder, str(step))["arrays"].items()
        if name.startswith((f"{part}.", "carry."))
    }
    if (store.folder_of(folder) / store.FROZEN).exists():
        stored |= store.contents(folder, store.FROZEN)["arrays"]
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()[:12]


def _tokenizer(start: Start, key: str) -> Path:
    """The folder that has the tokenizer of a helper, if it has any."""
    if start.run is not None:
        return other_run.check(start, key)[0] / folders.TOKENIZER
    if start.hub is not None:
        return fetch.fetch(start.hub, start.revision, fetch.TOKENIZER, key=f"{key}.hub").folder
    return hugging_face.weights(start, key)


def check_vocabulary(run: Run, ours: Vocabulary) -> None:
    """Refuse a helper to which the numbers of this run are other tokens."""
    for name, helper in run.helpers.items():
        _check_same(_tokenizer(helper.start, key(name)), key(name), ours)


def _check_same(folder: Path, key: str, ours: Vocabulary) -> None:
    if not (folder / hugging_face.TOKENIZER).is_file():
        return
    theirs = vocabularies.load(str(folder))
    if (number := ours.first_difference(theirs)) is not None:
        raise UserError(
            f"{key}: token {number} is {theirs.name(number)!r} in its vocabulary, {folder}, "
            f"and {ours.name(number)!r} in that of this run; both must be of one vocabulary, "
            f"as they are with tokenizer: {{kind: file, path: {folder}}}"
        )
