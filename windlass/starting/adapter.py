"""Initial weights of adapters: a PEFT folder, or the run that they continue."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from jaxtyping import Array

from windlass import config
from windlass.adapters import BaseAdapter, Peft
from windlass.config import Layers, Several, section
from windlass.config.reading import report, show
from windlass.config.recipe import overlay
from windlass.config.sections import fields, written
from windlass.errors import UserError
from windlass.hub import peft
from windlass.run import ADAPTERS
from windlass.run_folder import folder as folders
from windlass.run_folder import runs


def listed(section: Any) -> list[dict[str, Any]]:
    """The adapters that a recipe's section names: none, one alone, or a list of them."""
    return section if isinstance(section, list) else [] if section is None else [section]


@section
class _Adapted:
    """The part of a recipe that names adapters."""

    adapter: Annotated[tuple[Any, ...], Several(ADAPTERS)] = ()


def read(entry: Any) -> tuple[BaseAdapter, ...]:
    """The adapters of a recipe's section `adapter`."""
    return config.read(_Adapted, {"adapter": entry}).adapter


def resolve(theirs: Any, layers: Layers) -> dict[str, Any]:
    """The adapter section of another run, for a recipe that may have its own.

    A path is where they once started from. One section here stands for all of a list there.
    """
    entry = layers.merged(None).get("adapter")
    is_one = isinstance(entry, dict) and not all(key.isdigit() for key in entry)
    if theirs is None or (isinstance(theirs, list) and is_one):
        return {}
    items = [one | ({"path": None} if "path" in one else {}) for one in listed(theirs)]
    return {"adapter": items if isinstance(theirs, list) else items[0]}


def written_out(layers: Layers) -> Layers:
    """A recipe with the settings in the folder `adapter.path` written out under its own."""
    entry = layers.merged(None).get("adapter")
    if isinstance(entry, dict):
        if (settings := _settings(layers, entry, "adapter")) is None:
            return layers
        return layers.upon({"adapter": settings}, instead_of={})
    if not isinstance(entry, list):
        return layers
    items = [overlay(_settings(layers, one, f"adapter.{i}"), one) for i, one in enumerate(entry)]
    rest = {key: x for key, x in layers.command_line.items() if key != "adapter"}
    recipe = layers.recipe | {"adapter": items}
    return dataclasses.replace(layers, recipe=recipe, command_line=rest)


def _settings(layers: Layers, entry: Any, key: str) -> dict[str, Any] | None:
    """Settings in the folder of an adapter, which those of the recipe must not contradict."""
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        return None
    settings = _settings_of_run(layers, entry["path"])
    if settings is None:
        stored = peft.read(_folder(entry["path"]))
        settings = {"kind": stored.kind, **stored.settings}
    free = ADAPTERS.load(settings["kind"]).free
    problems = [
        (f"{key}.{name}", f"is {show(entry[name])}; that of {entry['path']} is {show(value)}")
        for name, value in settings.items()
        if name not in free and entry.get(name) is not None and _plain(entry[name]) != value
    ]
    if problems:
        raise UserError(report(problems, layers.origin))
    return settings


def shared(theirs: Any, ours: tuple) -> int | None:
    """Number of adapters of another run that are trained further here: all, or None of them.

    `theirs` is the section of its recipe. What is not trained further is merged into its model.
    """
    known, here = (_listed(some) for some in (read(theirs) if theirs else (), ours))
    goes_on = known == here[: len(known)] and not any(
        getattr(one, "path", None) for one in ours[: len(known)]
    )
    return len(known) if goes_on else None


def _listed(some: tuple[BaseAdapter, ...]) -> list[dict[str, Any]]:
    return [_essential(one) for one in listed(written(fields(_Adapted)["adapter"][1], some))]


def _essential(section: dict[str, Any]) -> dict[str, Any]:
    """The keys of an adapter that decide what its arrays mean."""
    free = ADAPTERS.load(section["kind"]).free
    return {key: x for key, x in section.items() if key not in free}


def take(
    built: Any, say: Callable[[str], None]
) -> tuple[dict[int, dict[str, Array]], list[tuple[str, str]]]:
    """The arrays of the adapters that start from a folder, after how many adapters, and facts."""
    arrays, facts, start = {}, [], built.run.start
    base = start and (start.hub or start.path or start.run)
    for number, adapter in enumerate(built.run.adapter, start=1):
        if not isinstance(adapter, Peft) or (path := getattr(adapter, "path", None)) is None:
            continue
        stored = peft.read(_folder(path))
        arrays[number] = peft.load(stored, built.stages[number], adapter, built.names, base)
        if stored.base and start and start.hub not in (None, stored.base):
            origin = f"the adapter in {path} was made for {stored.base}"
            say(f"{origin}; this run puts it on {start.hub}")
        size = sum(x.size for x in arrays[number].values())
        facts.append(("adapter", f"{size:,} parameters of {path}"))
    return arrays, facts


def _settings_of_run(layers: Layers, path: str) -> dict[str, Any] | None:
    """Settings that the resumed run once read there: the folder may be another now, or gone."""
    is_named = "dir" in (layers.merged(None).get("run") or {})
    if not is_named and (_folder(path) / peft.CONFIG).is_file():
        return None
    recipes = [folders.stored(folder) for folder in runs.of_recipe(layers)]
    adapters = [one for recipe in recipes for one in listed(recipe.get("adapter"))]
    match = next((one for one in adapters if one.get("path") == path), None)
    return match and {key: x for key, x in match.items() if key not in ("path", "init")}


def _folder(path: str) -> Path:
    return Path(path).expanduser()


def _plain(value: Any) -> Any:
    is_names = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return sorted(value) if is_names else value
