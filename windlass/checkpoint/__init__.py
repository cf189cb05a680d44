"""Checkpoints of any tree of arrays: how often, how many, and none that is believed unchecked."""

from typing import TYPE_CHECKING, Any

from windlass.config import section

if TYPE_CHECKING:
    from windlass.checkpoint.fingerprint import fingerprints
    from windlass.checkpoint.store import Restored, Store, load
    from windlass.checkpoint.verify import Report, verify

__all__ = ["Checkpoint", "Report", "Restored", "Store", "fingerprints", "load", "verify"]


@section
class Checkpoint:
    """When a run saves itself; the end of a run and a stop by signal always do."""

    every: int = 500  # optimiser steps
    keep: int = 3  # the newest ones; the one with the lowest validation loss stays beside them

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def __getattr__(name: str) -> Any:
    # Reading a recipe imports this file, and must not wait for JAX and Orbax.
    if name == "fingerprints":
        from windlass.checkpoint import fingerprint as home
    elif name in ("Restored", "Store", "load"):
        from windlass.checkpoint import store as home
    elif name in ("Report", "verify"):
        from windlass.checkpoint import verify as home
    else:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(home, name)
