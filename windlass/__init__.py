"""Train language models on whatever accelerator there is, from one recipe."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from windlass.version import __version__ as __version__

if TYPE_CHECKING:
    from windlass.api import (
        best,
        calibrate,
        chat,
        compare,
        data,
        delete,
        diagnose,
        doctor,
        evaluate,
        export,
        generate,
        launch,
        new,
        plan,
        prices,
        recipe,
        report,
        runs,
        schema,
        tasks,
        teach,
        train,
        verify,
        watch,
    )

__all__ = [
    "best",
    "calibrate",
    "chat",
    "compare",
    "data",
    "delete",
    "diagnose",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "launch",
    "new",
    "plan",
    "prices",
    "recipe",
    "report",
    "runs",
    "schema",
    "tasks",
    "teach",
    "train",
    "verify",
    "watch",
]
ROOMS = ("data", "launch")  # folders of the package that have the name of a call


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that a recipe can be read without starting an accelerator.
    if name in ROOMS:
        return import_module(f"windlass.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("windlass.api"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _CallableModule(ModuleType):
    """A folder of the package that can be called: `windlass.data("quickstart")`."""

    def __call__(self, *words: Any, **options: Any) -> Any:
        return self._call(*words, **options)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._call)

    @property
    def _call(self) -> Any:
        return getattr(import_module("windlass.api"), self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package: whoever imports a folder with the name of a call makes it callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ROOMS and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
