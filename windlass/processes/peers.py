"""The other processes of a run: what becomes of it when one of them ends before its time."""

import json
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import jax

from windlass.config import differences, listing
from windlass.config.reading import show
from windlass.errors import PeerLost, UserError
from windlass.processes import hosts as processes
from windlass.processes.clusters import Hosts
from windlass.processes.failures import (
    Lost,
    NewestStep,
    is_of_an_exchange,
    left,
    log_hint,
    process_name,
)
from windlass.processes.hosts import HEARTBEAT_SECONDS
from windlass.processes.signals import Signals, clear, say
from windlass.version import __version__, source_hash

REFUSED, FAILED = 2, 1
OWN_WORDS_SECONDS = 1.0  # a process that refuses what another refuses, too, says so itself
CLOSED_SECONDS = 5.0  # until the ending of a process that closes its connections is known
CLOSED = ("closed by peer", "reset by peer", "Broken pipe")
# What may be another on each host: where and how fast rows are read.
OWN = ("data.cache", "data.workers", "data.prefetch")

NO_REASON = "null"  # in JSON: the run does not end early

_speaks = threading.Lock()  # held by whoever says why this process ends, and never given back


@contextmanager
def together(hosts: Hosts | None, signals: Signals, newest: NewestStep) -> Iterator["Peers | None"]:
    """The other processes in this block, joined if they are not yet; None where there are none."""
    if hosts is None or signals.peers is not None:
        yield signals.peers
        return
    with Peers(hosts, signals, newest) as peers:
        yield peers


class Peers:
    """This process among the others, from joining them to the end of the run."""

    def __init__(self, hosts: Hosts, signals: Signals, newest: NewestStep):
        self.hosts, self.signals, self.newest = hosts, signals, newest
        self.folder: str | None = None
        self.is_over = False  # the run ends early, here first or by another process
        if processes.joined() is None:
            with signals.phase(processes.WAITING):
                processes.join(hosts, lambda text: say(f"{signals.who}{text}"))
        self.names = processes.each("name", socket.gethostname())
        self._send(names=self.names)
        self._ending = processes.Ending()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __enter__(self) -> "Peers":
        self.signals.peers = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._close()
        elif isinstance(error, UserError):
            self.end(str(error), REFUSED)
        elif isinstance(error, Exception):
            self._explain(error)

    def trains_in(self, folder: Path) -> None:
        self.folder = str(folder)
        self._send(folder=self.folder)

    def compare(self, recipe: dict) -> None:
        """Refuse to train different recipes, or by different programs, as one run."""
        programs = {"windlass": __version__, "jax": jax.__version__}
        programs["windlass.source"] = source_hash()
        ours = programs | recipe
        every = [json.loads(one) for one in processes.each("recipe", json.dumps(ours))]
        wrong = [
            f"process {number} has {key} {show(theirs)}, process 0 has {show(first)}"
            for number, one in enumerate(every)
            for key, first, theirs in differences(every[0], one)
            if key not in OWN
        ]
        if wrong:
            what = "the same recipe and the same keys"
            if any(key in wrong[0].split() for key in programs):
                what = "the same versions of windlass and JAX, to the last line of their source"
            raise UserError("\n".join(wrong) + f"; start every host with {what}")

    def ask_to_stop(self, number: signal.Signals) -> None:
        processes.ask_to_stop(number)

    def stop_after(self, step: int) -> signal.Signals | None:
        number = processes.stop_after(step)
        return None if number is None else signal.Signals(number)

    def end(self, text: str, code: int) -> None:
        """Have every process end with this text; this one says it itself, and then parts."""
        _speaks.acquire()
        self.is_over = True
        why = {"process": self.hosts.process, "text": text, "code": code}
        self._ending.set(json.dumps(why))

    def part(self, code: int) -> None:
        processes.part(code)

    def _close(self) -> None:
        """The end of a run that comes to all processes alike."""
        try:
            processes.barrier("the end")
        except PeerLost as error:
            self._explain(error)
        self.signals.finishes()
        # The service may not be called any more when it is shut down: the process would crash.
        self._ending.set(NO_REASON)
        self._listener.join()
        self.signals.peers = None

    def _listen(self) -> None:
        """Wait for another process to end the run, and end with it."""
        why = self._ending.wait()
        if why in (None, NO_REASON):
            return
        ending = json.loads(why)
        if ending["process"] == self.hosts.process:
            return
        time.sleep(OWN_WORDS_SECONDS)
        _speaks.acquire()
        who = process_name(ending["process"], self.names)
        what = f"{who} ended the run: {ending['text']}"
        if ending["code"] == FAILED:
            what += f". {left(self.folder, self.newest)}"
        clear()
        say(f"{self.signals.who}{what}")
        processes.part(ending["code"])

    def _explain(self, error: Exception) -> None:
        """Distinguish a fault of this process from one that is only the end of another."""
        text = str(error)
        if not isinstance(error, PeerLost) and not is_of_an_exchange(error):
            first = text.partition("\n")[0]
            self.end(f"it failed, by {type(error).__name__}: {first}", FAILED)
            return
        # Whoever ended with words is heard meanwhile, and of who did not JAX's service says so and
        # ends this process: the parent then has the words.
        is_closed = self.hosts.processes == 2 and any(word in text for word in CLOSED)
        seconds = CLOSED_SECONDS if is_closed else HEARTBEAT_SECONDS + 10
        if processes.is_everybody_here("an error", seconds):
            self.is_over = True
            return
        _speaks.acquire()
        self.is_over = True
        lost = Lost([], text.partition("\n")[0])
        if is_closed:
            lost = Lost([1 - self.hosts.process], "its connection is closed")
        raise PeerLost(
            lost.message(self.names, left(self.folder, self.newest)) + self._log_hint(error)
        ) from error

    def _log_hint(self, error: Exception) -> str:
        """The place of the log, to which an error that is none of this process's is added."""
        if self.signals.line is None:
            return ""
        log = self.signals.line.log
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        return log_hint(log)

    def _send(self, **facts: object) -> None:
        if self.signals.line is not None:
            self.signals.line.send(**facts)


def check_devices(processes: int, devices: list) -> None:
    """Refuse devices of which some process has none."""
    idle = set(range(processes)) - {device.process_index for device in devices}
    if idle:
        who = listing((f"process {number}" for number in sorted(idle)), "and")
        raise UserError(
            f"device.count is {len(devices)}, which leaves {who} without a device; leave it out, "
            "or start fewer processes"
        )
