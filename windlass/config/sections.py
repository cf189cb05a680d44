"""Sections: frozen dataclasses, the types their fields may have, and writing them again."""

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[T]) -> type[T]:
    """One part of a run: a plain dataclass, frozen and keyword-only.

    With `shorthand: ClassVar[str] = "kind"`, a plain value written where the section is expected
    is the value of that field: `device: tpu` is `device: {kind: tpu}`.
    """
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@dataclasses.dataclass(frozen=True)
class Open:
    """Marks a field that holds one of an open set: `Annotated[Any, Open("windlass.models", ...)]`.

    The key `tag` names a file of `package`, and the other keys are read into its `attribute`.
    """

    package: str
    tag: str
    attribute: str
    usual: str | None = None  # the file that is meant where none is named
    instead: type | None = None  # a section whose keys may say where tag and fields are found

    def names(self) -> list[str]:
        """The files of the folder, each a thing that can be named."""
        path = importlib.import_module(self.package).__path__
        names = [module.name for module in pkgutil.iter_modules(path)]
        return sorted(name for name in names if not name.startswith("_"))

    def load(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)


@dataclasses.dataclass(frozen=True)
class Several:
    """Marks a field that holds any number of an open set: `Annotated[tuple, Several(Open(...))]`.

    A recipe says nothing, names one alone, or has a list of them, in order.
    """

    of: Open


class Spelled(ABC):
    """A value that has a spelling of its own in a recipe, such as `15min`."""

    words: ClassVar[str]  # what may be written
    schema: ClassVar[dict[str, Any]]  # the same to an editor

    @classmethod
    @abstractmethod
    def read(cls, value: Any) -> "Spelled":
        """The value of what was written, or a ValueError that says what would do."""

    @abstractmethod
    def written(self) -> Any:
        """Text that reads back as this."""


# In a mapping whose tag was changed by a later layer: the keys that were set for the former member.
FORMER = "\0"


@dataclasses.dataclass(frozen=True)
class Holds:
    """The type an annotation stands for: a section, one of an open set, a sequence, or a leaf."""

    shape: Literal["section", "open", "several", "list", "tuple", "mapping", "spelled", "leaf"]
    of: Any  # the section, the Open, the Spelled, the annotation of an item, or of the leaf
    optional: bool


def holds(annotation: Any) -> Holds:
    choices = _alternatives(annotation)
    inner = [choice for choice in choices if choice is not NoneType]
    optional = len(inner) < len(choices)
    if len(inner) == 1:
        only, origin, args = inner[0], get_origin(inner[0]), get_args(inner[0])
        if isinstance(only, type) and issubclass(only, Spelled):
            return Holds("spelled", only, optional)
        if isinstance(only, type) and dataclasses.is_dataclass(only):
            return Holds("section", only, optional)
        if origin is Annotated and isinstance(args[1], Open):
            return Holds("open", args[1], optional)
        if origin is Annotated and isinstance(args[1], Several):
            return Holds("several", Annotated[Any, args[1].of], True)
        if origin is list:
            return Holds("list", args[0], optional)
        if origin is tuple and args[1:] == (...,):
            return Holds("tuple", args[0], optional)
        if origin is dict:
            return Holds("mapping", args[1], optional)
    return Holds("leaf", annotation, optional)


def fields(schema: Any) -> dict[str, tuple[dataclasses.Field, Any]]:
    """The fields of a section by name, with their annotations."""
    hints = get_type_hints(schema, include_extras=True)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(schema)}


def default(field: dataclasses.Field) -> Any:
    """A field's default, or MISSING if a value is required."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def below_one(instance: Any, *names: str) -> list[str]:
    """Problems of fields of a section that count something, where they are not null."""
    return [
        f"{name} is {value}; it must be 1 or more"
        for name in names
        if (value := getattr(instance, name)) is not None and value < 1
    ]


def leaves(annotation: Any) -> list[Any]:
    """The plain types a leaf may have, and the words of its literals."""
    types = []
    for choice in _alternatives(annotation):
        bare = get_args(choice)[0] if get_origin(choice) is Annotated else choice
        types += get_args(bare) if get_origin(bare) is Literal else [bare]
    return types


def _alternatives(annotation: Any) -> list[Any]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return list(get_args(annotation)) if is_union else [annotation]


def tree(instance: Any) -> Any:
    """A section as plain data, tags of open sets included: what `read` would make it from."""
    if isinstance(instance, Spelled):
        return instance.written()
    if dataclasses.is_dataclass(instance) and not isinstance(instance, type):
        return {
            name: written(annotation, getattr(instance, name))
            for name, (_, annotation) in fields(type(instance)).items()
        }
    if isinstance(instance, dict):
        return {key: tree(value) for key, value in instance.items()}
    if isinstance(instance, list | tuple):
        return [tree(item) for item in instance]
    return str(instance) if isinstance(instance, Path) else instance


def written(annotation: Any, value: Any) -> Any:
    """The value of a field as plain data."""
    slot = holds(annotation)
    match slot.shape:
        case "open" if value is not None:
            return {slot.of.tag: type(value).__module__.rpartition(".")[2], **tree(value)}
        case "several" if len(value or ()) < 2:  # one alone is no list, and none is null
            return written(slot.of, value[0]) if value else None
        case "list" | "tuple" | "several" if value is not None:
            return [written(slot.of, item) for item in value]
        case "mapping" if value is not None:
            return {key: written(slot.of, item) for key, item in value.items()}
    return tree(value)


def differences(a: dict, b: dict) -> list[tuple[str, Any, Any]]:
    """The dotted keys on which two trees differ, with both values; absent is None."""
    left, right = flat(a), flat(b)
    pairs = [(key, left.get(key), right.get(key)) for key in left | right]
    return [(key, one, other) for key, one, other in pairs if one != other]


def flat(tree: dict) -> dict[str, Any]:
    """A tree as one mapping with dotted keys."""
    pairs = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            inner = flat(value)
            pairs |= {dotted(key, name): item for name, item in inner.items()}
        else:
            pairs[key] = value
    return pairs


def dotted(*names: Any) -> str:
    return ".".join(str(name) for name in names if name != "")
