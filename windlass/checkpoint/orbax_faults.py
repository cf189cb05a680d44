"""Faults of Orbax that no option of it mends: logs, clocks, memory, tracebacks."""

import logging
import sys
import time
import warnings
from types import SimpleNamespace
from typing import Any

_INNER = "orbax.checkpoint._src"
_WAITING = ("futures.future", "futures.signaling_client", "checkpointers.async_checkpointer")
_COUNTING = "serialization.tensorstore_utils"
NEVER_AWAITED = "coroutine 'async_serialize"
"""How the warning of a part of a failed save begins, which Orbax began and nobody awaits."""
_report = sys.unraisablehook


def mend() -> None:
    """Mend what was imported of Orbax; what a release has renamed stays as it is."""
    # It logs the traceback of a failed save three times over. The error itself is raised by `wait`.
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    # Of a failed save it leaves parts behind that nobody awaits, of which Python tells when it
    # finds them, minutes later: a traceback each.
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    warnings.filterwarnings("ignore", NEVER_AWAITED, RuntimeWarning)
    # It waits by the clock of the system: one that is set while a checkpoint is saved would make it
    # late.
    monotonic = SimpleNamespace(**vars(time) | {"time": time.monotonic})
    for name in _WAITING:
        _replace(name, "time", monotonic)
    # It asks TensorStore before and after each save how many bytes it has written, to log it, and
    # TensorStore never frees the answer: 6 kB each time.
    _replace(_COUNTING, "get_tensorstore_raw_bytes", lambda direction=None: 0)
    sys.unraisablehook = unraisable_hook


def unraisable_hook(unraisable: Any) -> None:
    """Report what nobody can catch as Python does, but for what TensorStore says to nobody.

    Where a part of a save fails, Orbax closes the event loop that TensorStore then tells of every
    other part: a traceback each, beside the message of the failure.
    """
    is_nobodys = unraisable.object is None and isinstance(unraisable.exc_value, RuntimeError)
    if not (is_nobodys and str(unraisable.exc_value) == "Event loop is closed"):
        _report(unraisable)


def _replace(module: str, name: str, value: Any) -> None:
    if (found := sys.modules.get(f"{_INNER}.{module}")) is not None:
        vars(found)[name] = value
