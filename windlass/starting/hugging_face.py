"""Weights, config and tokenizer of a Hugging Face model, on the hub or in a folder."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from windlass import adapters, seal
from windlass.adapters import BaseAdapter
from windlass.checkpoint.fingerprint import named
from windlass.config import Layers, listing, tree
from windlass.config.start import FrozenBase, Start
from windlass.data import Data
from windlass.devices.axes import placements
from windlass.errors import UserError
from windlass.files import write_json
from windlass.hub import config as configs
from windlass.hub import fetch, quantized
from windlass.hub import weights as files
from windlass.program.abstract import abstract_model, is_shape
from windlass.run_folder import folder as folders
from windlass.run_folder import runs
from windlass.starting import adapter
from windlass.starting.four_bit_weights import BaseWeights

FULL_HASH = 40  # letters of a commit
TOKENIZER = "tokenizer.json"
START = "start.json"  # in the copy that a run keeps: the origin of its files


def resolve(
    start: Start, layers: Layers, fields: Sequence[str], *, has_tokenizer: bool, key: str = "model"
) -> dict[str, Any]:
    """The sections that a published model stands for, in a recipe that sets `fields` itself.

    A run of the recipe that is here already has what it began with: the hub is not queried again,
    and a folder may be gone.
    """
    copy = _copy_in_run(start, layers)
    if start.hub is not None:
        folder, revision = _fetched(start, layers, key) if copy is None else _from_copy(copy)
        named = {"hub": start.hub, "revision": revision}
        tokenizer = {"kind": "hub", **named}
    else:
        folder = _folder(start) if copy is None or _folder(start).is_dir() else copy
        if not folder.is_dir():
            raise UserError(f"{key}.path is {start.path}; there is no such folder")
        named = {"path": start.path}
        tokenizer = {"kind": "file", "path": start.path}
    _check_kind(folder, start, key)
    origin = f"{folder / configs.FILE}"
    about = configs.load(folder)
    sections = configs.sections(about, origin, fields)
    if (base := _base(start, quantized.read(about)[0], key)) is not None:
        named |= {"base": tree(base)}
    sections |= {"start": named} | adapter.resolve(sections.pop("adapter", None), layers)
    is_copy = (folder / START).is_file()
    has_own = (folder / TOKENIZER).is_file()
    data = layers.peek("data", Data)
    if data is not None and data.has_blocks and not has_own:  # which need no tokenizer
        is_stored = is_copy and (folder.parent / folders.TOKENIZER).is_dir()
        return sections | ({"tokenizer": tokenizer} if is_stored else {})
    if not (has_tokenizer or is_copy or has_own):
        raise UserError(
            f"{start.hub or start.path} has no {TOKENIZER}, the file that every current tokenizer "
            "is stored in; tokenizer: {kind: file, path: ...} names another"
        )
    return sections | {"tokenizer": tokenizer}


def _base(start: Start, stored: FrozenBase | None, key: str) -> FrozenBase | None:
    """The 4-bit base of a model: that of its files, or else the one that a recipe names."""
    if start.base is None or stored is None:
        return start.base or stored
    if start.base.kind != stored.kind:
        raise UserError(
            f"{key}.base is {start.base.kind}; the files of {start.hub or start.path} are "
            f"{stored.kind}: leave {key}.base out, or name a model whose weights are numbers"
        )
    return stored


def _fetched(start: Start, layers: Layers, key: str) -> tuple[Path, str]:
    assert start.hub is not None
    names = fetch.CONFIGS + fetch.TOKENIZER
    try:
        return fetch.fetch(start.hub, start.revision, names, key=f"{key}.hub")
    except UserError:
        # A branch that cannot be followed: its run goes on with the commit that it began with.
        copy = _copy_in_run(Start(hub=start.hub), layers)
        if copy is None or len(start.revision or "") == FULL_HASH:
            raise
        return _from_copy(copy)


def _from_copy(copy: Path) -> tuple[Path, str]:
    return copy, _origin(copy)["revision"]


def weights(start: Start, key: str = "model") -> Path:
    """The folder that has the weights, or a refusal; `key` names them."""
    folder = _folder(start)
    if start.hub is not None:
        names = fetch.CONFIGS + fetch.WEIGHTS
        folder = fetch.fetch(start.hub, start.revision, names, key=f"{key}.hub").folder
    elif not folder.is_dir():
        raise UserError(f"{key}.path is {start.path}; there is no such folder")
    files.files(folder)
    return folder


def check(start: Start) -> None:
    """Check that the weights are there, and those of an export as they were written."""
    _check_export(weights(start), is_weights=True)


def take(
    start: Start, model: PyTree, names: Mapping[str, str], key: str = "model"
) -> tuple[dict[str, Array], list[tuple[str, str]]]:
    """The weights of an abstract model, by path, and facts of them for people to read."""
    folder, base = weights(start, key), BaseWeights(model)
    arrays = files.load(folder, base.plain, names, base.fill)
    new = {path: x.size for path, x in named(model).items() if path not in arrays}
    size = sum(x.size for x in jax.tree.leaves(base.plain)) - sum(new.values())
    where = start.path if start.hub is None else f"{start.hub} at {(start.revision or '')[:12]}"
    facts = [("start", str(where)), ("loaded", f"all {size:,} parameters"), *base.facts()]
    if (beside := files.left_alone(folder)) is not None:
        facts.append(("left alone", beside))
    of_residual = sum(size for path, size in new.items() if "_residual." in path)
    parts = {"the residual": of_residual, "scores": sum(new.values()) - of_residual}
    facts += [("new", f"{size:,} parameters of {what}") for what, size in parts.items() if size]
    return arrays, facts


def take_for(start: Start, built: Any) -> tuple[dict[int, dict[str, Array]], list[tuple[str, str]]]:
    """The weights of a built model, after how many of its adapters, and facts.

    Adapters of the files that this run has too, in the same order, go on; any others are merged.
    """
    theirs = configs.load(weights(start)).get(configs.OWN, {}).get("adapter")
    stage = adapter.shared(theirs, built.run.adapter)
    if stage is not None and not (stage and built.run.base):
        arrays, facts = take(start, built.stages[stage], built.names)
        return {stage: arrays}, facts
    arrays, (first, *facts) = _merged(start, built, adapter.read(theirs))
    base = BaseWeights(built.stages[0])
    facts = [("start", f"{first[1]}, the adapter merged"), *facts]
    return {0: base.converted(arrays)}, facts + base.facts()


def _merged(
    start: Start, built: Any, theirs: tuple[BaseAdapter, ...]
) -> tuple[dict[str, Array], list[tuple[str, str]]]:
    """The weights of files with adapters as those of a plain model."""
    plain = replace(built.run.architecture, base=None)
    shapes, static = eqx.partition(abstract_model(plain, theirs), is_shape)
    here = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        placements(shapes, built.mesh),
    )
    arrays, facts = take(start, here, built.names)
    model = jax.tree.unflatten(jax.tree.structure(here), [arrays[path] for path in named(here)])
    merged = eqx.filter_jit(adapters.merged)(eqx.combine(model, static))
    return named(eqx.filter(merged, eqx.is_array)), facts


def keep(start: Start, folder: Path) -> None:
    """Keep the small files of a model in the folder of a run, and which model it is."""
    source, place = weights(start), folder / folders.MODEL
    place.mkdir(exist_ok=True)
    for name in fetch.CONFIGS:
        if (source / name).is_file():
            shutil.copyfile(source / name, place / name)
    if (card := _card(start, source)) is not None:
        shutil.copyfile(card, place / fetch.CARD)
    about = {"hub": start.hub, "revision": start.revision}
    if start.hub is None:
        about = {"path": start.path, "fingerprint": fingerprint(source)}
    write_json(place / START, about)  # half of it would stop every later start


def _card(start: Start, source: Path) -> Path | None:
    """Model card of a model, which names its licence; None where it cannot be had."""
    if start.hub is not None and not (source / fetch.CARD).is_file():
        try:
            source = fetch.fetch(start.hub, start.revision, (fetch.CARD,)).folder
        except UserError:  # nothing that is trained depends on it
            return None
    return source / fetch.CARD if (source / fetch.CARD).is_file() else None


def fingerprint(folder: Path) -> str:
    """Fingerprint of the model in a folder: its config.json, and the header of each file."""
    digest = hashlib.sha256((folder / configs.FILE).read_bytes())
    for file in files.files(folder):
        with file.open("rb") as opened:
            header = opened.read(8)
            header += opened.read(int.from_bytes(header, "little"))
        digest.update(f"{file.name} {file.stat().st_size}".encode() + header)
    return digest.hexdigest()


def _folder(start: Start) -> Path:
    return Path(start.path or "").expanduser()


def _copy_in_run(start: Start, layers: Layers) -> Path | None:
    """The newest copy, in a run of the recipe, of the small files of the model it began with."""
    places = [run / folders.MODEL for run in runs.of_recipe(layers)]
    same = [place for place in places if _is_of(place, start)]
    newest = max(same, key=lambda place: place.stat().st_mtime, default=None)
    if newest is not None:
        folders.check(newest.parent)
    return newest


def _is_of(place: Path, start: Start) -> bool:
    if not (place / START).is_file():
        return False
    origin = _origin(place)
    if start.hub is None:
        return origin.get("path") == start.path
    revision = start.revision
    return origin.get("hub") == start.hub and (revision is None or origin["revision"] == revision)


def _origin(place: Path) -> dict[str, str]:
    return configs.mapping(place / START)


def _check_export(folder: Path, *, is_weights: bool) -> None:
    """Refuse an export whose weights, or whose other files, are not as they were written."""
    if not (folder / seal.EXPORT).is_file():
        return
    try:
        names = seal.hashes(folder / seal.EXPORT)
    except ValueError:
        names = {seal.EXPORT: ""}
    only = [name for name in names if name.endswith(".safetensors") == is_weights]
    if broken := seal.broken(folder, seal.EXPORT, only=[x for x in only if x != "README.md"]):
        raise UserError(
            f"{listing((str(folder / name) for name in broken), 'and')}: not as the export was "
            f"written; put back a copy or export it again, or remove {folder / seal.EXPORT} if "
            "somebody changed it on purpose"
        )


def _check_kind(folder: Path, start: Start, key: str) -> None:
    """Refuse what is no whole model, and say what it is."""
    named = f"{key}.hub is {start.hub}" if start.hub else f"{key}.path is {start.path}"
    if (folder / configs.FILE).is_file():
        _check_export(folder, is_weights=False)
        return
    if runs.is_run(folder):
        raise UserError(f"{named}, which is a run; {key}.run names one")
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{named}, which is an adapter; adapter.path names one, and model.hub or model.path "
            "the model that it was made for"
        )
    raise UserError(f"{named}, which has no {configs.FILE}: it is no Hugging Face model")
