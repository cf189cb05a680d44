"""A recipe in its layers: the file, what it says for one kind of device, and the command line."""

import dataclasses
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from windlass.config import credentials
from windlass.config.reading import (
    Check,
    Problem,
    attempt,
    listing,
    offer,
    report,
    run,
    show,
    unknown,
)
from windlass.config.sections import FORMER, dotted
from windlass.config.text import parse, scalar
from windlass.errors import UserError

T = TypeVar("T")
KINDS = ("tpu", "gpu", "cpu")
DEEPEST = 20  # parts of a key, such as the three of data.source.path


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a recipe: file, device, command line; the kind of device decides which win."""

    name: str
    origin: str
    recipe: dict[str, Any]
    by_device: dict[str, dict[str, Any]]
    command_line: dict[str, Any]
    problems: tuple[Problem, ...] = ()  # those that are seen without knowing any section

    def merged(self, kind: str | None) -> dict[str, Any]:
        """The recipe, under its `by_device` for this kind, under the command line."""
        special = self.by_device.get(kind, {}) if kind else {}
        return overlay(overlay(self.recipe, special), self.command_line)

    def upon(self, base: dict[str, Any], *, instead_of: dict[str, tuple[str, ...]]) -> "Layers":
        """Layers over what other keys, by section, stand for; those themselves are removed."""

        def without(tree: dict[str, Any]) -> dict[str, Any]:
            rest = dict(tree)
            for section, names in instead_of.items():
                if isinstance(rest.get(section), dict):
                    rest[section] = {k: x for k, x in rest[section].items() if k not in names}
            return rest

        return dataclasses.replace(
            self,
            recipe=overlay(base, without(self.recipe)),
            command_line=without(self.command_line),
        )

    def peek(self, name: str, schema: type[T]) -> T | None:
        """One section as it is whatever the device, or None where it has problems."""
        instance, problems = attempt(schema, self.merged(None).get(name))
        return None if problems else instance

    def read(self, schema: type[T], kind: str | None, checks: Iterable[Check] = ()) -> T:
        """The run on one kind of device, or every problem, those of other kinds' keys included."""
        instance, here = attempt(schema, self.merged(kind))
        always = attempt(schema, self.merged(None))[1]
        problems = [*self.problems, *(problem for problem in here if problem in always)]
        for name in self.by_device:
            there = attempt(schema, self.merged(name))[1]
            new = [problem for problem in there if problem not in always]
            problems += [(dotted("by_device", name, key), what) for key, what in new]
        problems = problems or run(checks, instance)
        if problems:
            raise UserError(report(problems, self.origin))
        return instance


class Written(NamedTuple):
    """A recipe that is in no file, as YAML: under its name its runs are found."""

    name: str
    text: str


AnyRecipe = str | Path | dict[str, Any] | Written


def load(recipe: AnyRecipe, overrides: Sequence[str] = ()) -> Layers:
    """A recipe by path, by the name of one that ships with the package, or as a mapping."""
    problems: list[Problem] = []
    if isinstance(recipe, dict):
        name, origin, data = "recipe", "the recipe", recipe
    elif isinstance(recipe, Written):
        name, origin = recipe.name, "the recipe"
        data, problems = parse(recipe.text, origin)
    else:
        path = find(recipe)
        name, origin = path.stem, str(recipe) if path == Path(recipe) else path.stem
        try:
            data, problems = parse(path.read_text(encoding="utf-8"), origin)
        except UnicodeDecodeError as error:
            raise UserError(f"{origin} is not UTF-8 text: byte {error.start}") from None
        if not isinstance(data, dict | None):
            raise UserError(f"{origin} holds {show(data)}; a recipe is a mapping of sections")
    tree = _nested(data or {}, "", problems)
    command_line = _command_line(overrides, problems)
    credentials.refuse(tree, origin)
    credentials.refuse(command_line, "the command line")
    special = overlay(tree.pop("by_device", {}), command_line.pop("by_device", {}))
    by_device = _by_device(special, problems)
    if overrides:
        origin = f"{origin} and the command line"
    return Layers(name, origin, tree, by_device, command_line, tuple(problems))


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(resources.files("windlass"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(recipe: str | Path) -> Path:
    """Path of a recipe, which is a path that exists, or the name of one that ships."""
    path, known = Path(recipe), shipped()
    if path.is_file():
        return path
    if str(recipe) in known:
        return known[str(recipe)]
    if path.is_dir():
        raise UserError(f"{recipe} is a folder; a recipe is a YAML file")
    raise UserError(f'no file or recipe named "{recipe}"; {offer(recipe, list(known))}')


def overlay(base: Any, new: Any) -> Any:
    """`new` on top of `base`: mappings merge, anything else replaces.

    The items of a list are keys by their number (`adapter.1.rank=8`).
    A bare value and a mapping for the same section (`device: tpu`, then `device.count=4`) are both
    kept, the value under the empty key. Later keys stand later, so that the last one wins.
    Where another member of an open set is named, those keys are noted that were meant for the
    former one.
    """
    if new == {} and base is not None:
        return base
    if not isinstance(new, dict):
        if not isinstance(base, dict) or not base or new is None or isinstance(new, list):
            return new
        return {**{key: value for key, value in base.items() if key != ""}, "": new}
    if isinstance(base, list) and new.keys() <= {str(number) for number in range(len(base))}:
        return [overlay(item, new.get(str(number), {})) for number, item in enumerate(base)]
    merged = dict(base) if isinstance(base, dict) else {} if base is None else {"": base}
    if any(
        tag in merged and merged[tag] != new.get(tag, merged[tag]) for tag in ("kind", "family")
    ):
        merged[FORMER] = [key for key in merged if key not in new]
    for key, value in new.items():
        merged[key] = overlay(merged.pop(key, None), value)
    return merged


def _nested(data: dict[Any, Any], at: str, problems: list[Problem]) -> dict[str, Any]:
    """A mapping with its dotted keys opened up."""
    tree: dict[str, Any] = {}
    seen: set[str] = set()
    for path, value in _paths(data, at, problems):
        if len(path) > DEEPEST:
            what = f"has {len(path):,} parts; a key has at most {DEEPEST}"
            problems.append((f"{dotted(at, *path)[:40]}...", what))
            continue
        *parents, last = path
        node: Any = {last: value}
        for parent in reversed(parents):
            node = {parent: node}
        if dotted(*path) in seen:
            problems.append((dotted(at, *path), "is given twice"))
        seen.add(dotted(*path))
        tree = overlay(tree, node)
    return tree


def _paths(data: dict[Any, Any], at: str, problems: list[Problem]) -> Iterable[tuple[list, Any]]:
    for name, value in data.items():
        path = str(name).split(".")
        if isinstance(value, dict) and value:
            for inner, item in _paths(value, dotted(at, name), problems):
                yield [*path, *inner], item
        elif isinstance(value, list | tuple):
            here = dotted(at, name)
            items = [
                _nested(item, dotted(here, i), problems) if isinstance(item, dict) else item
                for i, item in enumerate(value)
            ]
            yield path, items
        else:
            yield path, value


def _command_line(overrides: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """`key=value`, `--key=value` and `--key value`, the last one of a key winning."""
    tree: dict[str, Any] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--") and words and not words[0].startswith("--"):
            equals, text = " ", words.pop(0)
        if not key or not equals:
            problems.append((key or word, f"has no value; write {key or 'key'}=value"))
            continue
        value: Any = scalar(text)
        if text[:1] in ("[", "{", '"', "'"):  # only these open YAML: `prompt=Tom: hello` is text
            try:
                value, twice = parse(text, "it")
            except UserError as error:
                problems.append((key, f"is {show(text)}; {str(error).splitlines()[0]}"))
                continue
            problems += [(dotted(key, name), what) for name, what in twice]
        tree = overlay(tree, _nested({key: value}, "", problems))
    return tree


def _by_device(overlays: Any, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The `by_device` overlays, without the keys that cannot be given there."""
    if not isinstance(overlays, dict):
        what = f"is {show(overlays)}; it must be a mapping of {listing(KINDS)}"
        problems.append(("by_device", what))
        return {}
    kinds = {}
    for kind, keys in overlays.items():
        if kind not in KINDS:
            problems.append((f"by_device.{kind}", unknown(kind, KINDS)))
        elif not isinstance(keys, dict | None):
            problems.append((f"by_device.{kind}", f"is {show(keys)}; it must be a mapping of keys"))
        else:
            kinds[kind] = dict(keys or {})
            if "device" in kinds[kind]:
                del kinds[kind]["device"]
                what = "cannot be set here: it decides which of these apply"
                problems.append((f"by_device.{kind}.device", what))
    return kinds
