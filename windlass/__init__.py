"""Train language models on whatever accelerator there is, from one recipe."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from windlass.version import __version__ as __version__

if TYPE_CHECKING:
    from windlass.api import (
        best,
        calibrate,
        chat,
        compare,
        delete,
        evaluate,
        export,
        generate,
        plan,
        prepare,
        prices,
        recipe,
        report,
        runs,
        schema,
        tasks,
        train,
        verify,
    )

__all__ = [
    "best",
    "calibrate",
    "chat",
    "compare",
    "delete",
    "evaluate",
    "export",
    "generate",
    "plan",
    "prepare",
    "prices",
    "recipe",
    "report",
    "runs",
    "schema",
    "tasks",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that a recipe can be read without starting an accelerator.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("windlass.api"), name)
