"""The process that a user starts where a run has several: its child trains, and it stands by.

JAX aborts a process that has lost another, in the middle of whatever it does and with words of its
own. A parent is there to report what happened, and gets the signals that JAX takes for itself.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.processes.clusters import Hosts
from windlass.processes.pipe import facts
from windlass.processes.signals import Signals, clear, say

if TYPE_CHECKING:
    from windlass.processes.failures import NewestStep

FAILED = 1


def stand_by(words: Sequence[str], hosts: Hosts, signals: Signals, newest: "NewestStep") -> int:
    """Train in a child process, with the words of a command, and return its exit code."""
    heard, passes = os.pipe()
    reads, writes = os.pipe()
    descriptor, log = tempfile.mkstemp(prefix=f"windlass-process-{hosts.process}-", suffix=".log")
    os.close(descriptor)
    # Nothing of the folder that a user is in is imported there, unless it is here, too.
    flag = [] if os.getcwd() in sys.path else ["-P"]
    argv = [sys.executable, *flag, "-m", "windlass.cli.child", str(heard), str(writes), log, *words]
    with signals.passes_on(partial(_pass, passes)):
        # In a session of its own, so that a terminal's Ctrl-C reaches it once: through here.
        trainer = subprocess.Popen(argv, pass_fds=(heard, writes), start_new_session=True)
        os.close(heard)
        os.close(writes)
        code = trainer.wait()
    os.close(passes)
    report = facts(reads)
    os.close(reads)
    if code >= 0:
        # It has reported its end itself.
        if code != FAILED or not Path(log).stat().st_size:
            Path(log).unlink()
        return code
    clear()
    who = "" if hosts.process == 0 else f"{hosts}: "
    say(who + explained(-code, log, report.get("names", ()), report.get("folder"), newest))
    return FAILED


def _pass(passes: int, number: signal.Signals) -> None:
    try:
        os.write(passes, bytes([number]))
    except BrokenPipeError:  # it has just ended
        pass


def explained(
    number: int, log: str, names: Sequence[str], folder: str | None, newest: "NewestStep"
) -> str:
    """The reason why a trainer was ended by a signal, as far as it is known."""
    # JAX is imported by these, and a parent that has nothing to explain never needs it.
    from windlass.processes.failures import in_log, left, log_hint
    from windlass.processes.hosts import JOINING_SECONDS

    text = Path(log).read_text(encoding="utf-8", errors="replace")
    where, is_left = log_hint(log), left(folder, newest)
    if not names and "RegisterTask" in text:
        minutes = JOINING_SECONDS // 60
        return (
            f"not all processes were there within {minutes} minutes; every host needs the same "
            f"command, and must reach the coordinator{where}"
        )
    if lost := in_log(text):
        return lost.message(names, is_left) + where
    name = signal.Signals(number).name
    memory = ", as happens where memory runs out" if number == signal.SIGKILL else ""
    return f"the trainer was ended by {name}{memory}. {is_left}{where}"
