"""Experiment trackers of a run: each in a process of its own, where nothing can hold the run up.

A tracker prints, asks for a login, catches signals, waits for a network, and keeps its program
alive at the end: to the process that trains none of that happens. What is sent is queued, and a
thread hands it on.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from windlass import files
from windlass.config import listing
from windlass.errors import UserError
from windlass.processes import hosts
from windlass.telemetry import Telemetry, panels

NAME = "trackers.json"  # the id of the run in its trackers, and those that have it
WANDB_FOLDER = "wandb"  # which Weights & Biases makes in the folder that it is given
EXTRA = "pip install 'windlass-lm[track]'"
LAST_SECONDS = 30.0  # that a run waits for its trackers, after its end
MOST = 100_000  # jobs that may wait for a tracker before it is given up
# What brings to a tracker what it did not get.
LATER = {
    "wandb": "WANDB_MODE=offline would keep them for `wandb sync`",
    "trackio": "without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL they are stored on this machine",
}

Say = Callable[[str], None]


def check(telemetry: Telemetry) -> None:
    """Refuse trackers whose packages are not installed, before a run begins."""
    missing = [name for name in telemetry.trackers.names if hosts.is_first() and not _is_here(name)]
    if missing:
        packages = "the package" if len(missing) == 1 else "the packages"
        are = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"telemetry.trackers has {listing(missing, 'and')}, and {packages} of that name {are} "
            f"not installed: {EXTRA} does that, and telemetry.trackers=null leaves trackers out"
        )


def _is_here(name: str) -> bool:
    found = find_spec(name)
    # A folder of that name, such as wandb leaves behind, is found too: it has no file.
    return found is not None and found.origin is not None


class TrackerProcess:
    """A tracker in a process of its own, and the thread that feeds it."""

    def __init__(self, name: str):
        self.name, self.has_begun, self.has_failed = name, False, False
        self._jobs: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._replies: SimpleQueue[dict[str, str]] = SimpleQueue()
        # Nothing of the folder that a user is in is imported there, unless it is here, too.
        flag = [] if os.getcwd() in sys.path else ["-P"]
        self._process = subprocess.Popen(
            [sys.executable, *flag, "-m", "windlass.telemetry.tracker_process", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is not for it: the run ends it
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, do: str, **facts: Any) -> None:
        if self.has_failed:
            return
        if self._jobs.qsize() < MOST:
            self._jobs.put({"do": do, **facts})
        else:
            self._fail(f"it is {MOST:,} records behind")

    def replies(self) -> Iterable[dict[str, str]]:
        """Facts and failures that have come since the last call."""
        while not self._replies.empty():
            yield self._replies.get()

    def close(self, deadline: float) -> None:
        """Let it finish what it was sent, up to a time of the monotonic clock, or end it."""
        self._jobs.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("it had not finished when the run had")
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it started
        self._process.wait()
        self._thread.join()
        for pipe in self._pipes:
            with suppress(OSError):  # of a line that nobody read
                pipe.close()

    def _feed(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._pipes[0].write(json.dumps(job) + "\n")
                self._pipes[0].flush()
                reply = json.loads(self._pipes[1].readline())
                if "failed" in reply:
                    return self._fail(reply["failed"])
                self.has_begun = True
                if reply:
                    self._replies.put(reply)
        except (OSError, ValueError):  # a pipe without a reader, or a line that is not whole
            self._fail("its process ended")

    def _fail(self, why: str) -> None:
        if not self.has_failed:
            self.has_failed = True
            self._replies.put({"failed": why})


class Trackers:
    """The trackers of a run, from its first step on; of several processes the first alone has any.

    A tracker that fails is reported once, in a warning, and gets nothing more.
    """

    def __init__(self, folder: Path, telemetry: Telemetry, warn: Say, tell: Callable[..., None]):
        self._folder, self._telemetry, self._warn, self._tell = folder, telemetry, warn, tell
        self._processes: list[TrackerProcess] = []
        self._sent: dict[str, set[tuple[int, str]]] = {}
        self._stored: dict[str, Any] = {}

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def are_wanted(self) -> bool:
        return bool(self._telemetry.trackers.names) and hosts.is_first()

    @property
    def are_on(self) -> bool:
        return bool(self._processes)

    def begin(
        self, step: int, config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
    ) -> None:
        """The run starts or resumes after a step; `records` are all that it has written so far.

        A tracker that has the run already keeps what it was sent of steps that are taken again. One
        that is new gets the records up to here.
        """
        if not self.are_wanted:
            return
        self._stored = self._opened()
        again = [record for record in records if record["step"] > step]
        for name in self._telemetry.trackers.names:
            try:
                process = TrackerProcess(name)
            except OSError as error:  # no memory for it, or too many processes
                self._report_failure(name, f"it cannot be started ({error.strerror})")
                continue
            self._processes.append(process)
            process.send(
                "begin",
                id=self._stored["id"],
                name=self._folder.absolute().name,
                folder=str(self._folder.absolute()),
                project=self._telemetry.project,
                config=config,
            )
            if name in self._stored["has"]:
                self._sent[name] = {(one["step"], metric) for one in again for metric in one}
            else:
                for record in records[: len(records) - len(again)]:
                    process.send("write", step=record["step"], values=panels.curves(record))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for process in self._processes:
            sent = self._sent.get(process.name, ())
            new = {name: value for name, value in values.items() if (step, name) not in sent}
            if curves := panels.curves(new):
                process.send("write", step=step, values=curves)
        self._look()

    def text(self, step: int, name: str, text: str) -> None:
        for process in self._processes:
            if all(step >= other for other, _ in self._sent.get(process.name, ())):
                process.send("text", step=step, name=name, text=text)
        self._look()

    def page(self, step: int, name: str, html: str) -> None:
        for process in self._processes:
            process.send("page", step=step, name=name, html=html)

    def close(self, is_finished: bool = False) -> None:
        """End the run in its trackers, and wait a while for that; closing twice does no harm."""
        for process in self._processes:
            process.send("end", is_finished=is_finished)
        deadline = time.monotonic() + LAST_SECONDS
        for process in self._processes:
            process.close(deadline)
        self._look()
        self._processes = []

    def _look(self) -> None:
        """Report what trackers answered, and note which of them have the run."""
        for process in self._processes:
            for reply in process.replies():
                if "where" in reply:
                    self._tell(process.name, reply["where"])
                if "warned" in reply:
                    self._warn(f"{process.name}: {reply['warned']}")
                if "failed" in reply:
                    self._report_failure(process.name, reply["failed"])
            if process.has_begun and process.name not in self._stored["has"]:
                self._stored["has"].append(process.name)
                with suppress(OSError):  # a full disk is reported by what the run itself writes
                    files.write_json(self._folder / NAME, self._stored)

    def _report_failure(self, name: str, why: str) -> None:
        self._warn(
            f"{name} gets no more of this run: {why}. The run goes on, and its folder has all "
            f"numbers; {LATER[name]}"
        )

    def _opened(self) -> dict[str, Any]:
        path = self._folder / NAME
        try:
            found = files.parse_json(path.read_bytes())
            return {"id": str(found["id"]), "has": [str(name) for name in found["has"]]}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError):
            self._warn(f"{path} is not as it was written; trackers get this run as another one")
        begun = {"id": secrets.token_hex(6), "has": []}
        files.write_json(path, begun)
        return begun
