"""Train language models on whatever accelerator there is, from one recipe."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# What `windlass.<name>` is, and where it lives. Imported when asked for, so that `import windlass`
# costs nothing and a recipe can be read without starting an accelerator.
_CALLS = {
    "train": "windlass.training",
    "evaluate": "windlass.evaluation",
    "generate": "windlass.evaluation",
}
__all__ = ["__version__", *_CALLS]


def __getattr__(name: str) -> Any:
    if name not in _CALLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CALLS[name]), name)
