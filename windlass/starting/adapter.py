"""Initial weights of an adapter: a PEFT folder, or the run that it continues."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
from jaxtyping import Array

from windlass.config import Layers, tree
from windlass.config.reading import report, show
from windlass.errors import UserError
from windlass.hub import peft
from windlass.run_folder import folder as folders
from windlass.run_folder import runs

# What may be another in training that goes on: it changes nothing of what the arrays mean.
FREE = ("kind", "path", "dropout", "init")


def written_out(layers: Layers) -> Layers:
    """A recipe with what the folder `adapter.path` says of its adapter under what is said here."""
    said = layers.merged(None).get("adapter")
    if not isinstance(said, dict) or not isinstance(said.get("path"), str):
        return layers
    known = _kept(layers, said["path"]) or peft.read(_folder(said["path"])).settings
    problems = [
        (f"adapter.{key}", f"is {show(said[key])}; that of {said['path']} is {show(value)}")
        for key, value in known.items()
        if key not in FREE and said.get(key) is not None and _plain(said[key]) != value
    ]
    if problems:
        raise UserError(report(problems, layers.origin))
    return layers.upon({"adapter": {"kind": "lora", **known}}, instead_of={})


def goes_on(theirs: dict[str, Any], ours: Any) -> bool:
    """Whether an adapter of another run is trained further, and not merged into its model."""
    if ours is None or getattr(ours, "path", None) is not None:
        return False
    one, other = ({k: x for k, x in each.items() if k not in FREE} for each in (theirs, tree(ours)))
    return one == other


def take(built: Any, say: Callable[[str], None]) -> tuple[dict[str, Array], list[tuple[str, str]]]:
    """The arrays of the adapter that a built model starts with, and what is to be said of them."""
    path, start = getattr(built.run.adapter, "path", None), built.run.start
    if path is None:
        return {}, []
    stored, whole = peft.read(_folder(path)), eqx.combine(built.abstract, built.static)
    base = start and (start.hub or start.path or start.run)
    arrays = peft.load(stored, whole, built.names, base)
    if stored.base and start and start.hub not in (None, stored.base):
        say(f"the adapter in {path} was made for {stored.base}; this run puts it on {start.hub}")
    return arrays, [("adapter", f"{sum(x.size for x in arrays.values()):,} parameters of {path}")]


def _kept(layers: Layers, path: str) -> dict[str, Any] | None:
    """What the run that is to go on once read there: the folder may be another now, or gone."""
    is_named = "dir" in (layers.merged(None).get("run") or {})
    if not is_named and (_folder(path) / peft.CONFIG).is_file():
        return None
    stored = (folders.stored(folder).get("adapter") or {} for folder in runs.of_recipe(layers))
    found = next((one for one in stored if one.get("path") == path), None)
    return found and {key: x for key, x in found.items() if key not in ("kind", "path", "init")}


def _folder(path: str) -> Path:
    return Path(path).expanduser()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value
