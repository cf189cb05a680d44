"""Messages of a run that lost one of its processes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from windlass.config import listing
from windlass.processes.hosts import HEARTBEAT_SECONDS

# What JAX logs before it ends a process that has lost others, or the one that serves them all.
SILENT = r"stopped sending heartbeats\):\n(.*?)\nThe tasks have crashed"
CLOSED = "Failed to send RPC to coordination service"
# In the error of a failed collective between processes, whoever's fault it is.
EXCHANGES = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")

# The newest step that is saved in a folder of a run: a question for the room of checkpoints.
NewestStep = Callable[[Path], int | None]


class Lost(NamedTuple):
    """Lost processes; empty where it is not known which."""

    gone: list[int]
    why: str

    def message(self, names: Sequence[str], left: str) -> str:
        """The processes that are gone, what is left of the run, and what to do."""
        who = listing([process_name(one, names) for one in self.gone] or ["another process"], "and")
        are = "is" if len(self.gone) < 2 else "are"
        return f"{who} {are} gone: {self.why}. {left}"


def in_log(text: str) -> Lost | None:
    """Lost processes as JAX's log names them, where it does."""
    if match := re.search(SILENT, text, re.DOTALL):
        numbers = re.findall(r"(\d+)\s*$", match[1], re.MULTILINE)
        gone = sorted({int(number) for number in numbers})
        return Lost(gone, f"no sign of life for {HEARTBEAT_SECONDS} s")
    return Lost([0], "its connection is closed") if CLOSED in text else None


def is_of_an_exchange(error: BaseException | None) -> bool:
    """Test for a failed collective: an error of JAX, or a plain ValueError from Gloo.

    Whatever catches it on the way, as Orbax does, raises another from it.
    """
    if error is None:
        return False
    is_own = any(word in str(error) for word in EXCHANGES)
    return is_own or is_of_an_exchange(error.__cause__ or error.__context__)


def process_name(process: int, names: Sequence[str]) -> str:
    """Name of a process in messages: `process 1 (host-b)`."""
    return f"process {process}" + (f" ({names[process]})" if names else "")


def left(folder: str | None, newest: NewestStep) -> str:
    """The newest checkpoint, from which the run can be resumed."""
    step = newest(Path(folder)) if folder else None
    if step is None:
        return "Nothing was saved yet: the same command on every host begins again"
    return (
        f"Nothing up to step {step}, the newest checkpoint in {folder}, is lost: the same "
        "command on every host goes on from there"
    )


def log_hint(log: str) -> str:
    """The place of the log of libraries, where they printed anything."""
    return f". What JAX said is in {log}" if Path(log).stat().st_size else ""
