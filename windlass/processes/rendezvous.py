"""Rendezvous: the processes of a run meet at the coordinator's port before JAX takes it.

JAX waits in silence for whoever is missing, and ends in words of its own when one never comes or
when they disagree on how many they are. Here each tells process 0 its rank and the world size, and
all are told who is missing.
"""

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from windlass.config import listing
from windlass.errors import PeerLost, UserError
from windlass.files import parse_json
from windlass.processes.clusters import Hosts
from windlass.units import duration

FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0  # of waiting, before that is printed, and printed again
BEAT_SECONDS = 1.0  # between two words of process 0 to those who wait with it
SILENT_SECONDS = 10.0  # after which whatever listens at the port is not process 0
LONGEST_LINE = 1 << 16  # bytes, in which thousands of missing processes are listed
NAMED = 8  # processes in a message

Say = Callable[[str], None]


def meet(hosts: Hosts, say: Say, *, seconds: float) -> None:
    """Return when all processes are at the port of the coordinator, which is free again then."""
    waiting = _Waiting(hosts, say, seconds)
    if hosts.process:
        _attend(hosts, waiting)
    else:
        with _listener(hosts) as listener:
            _Gathering(hosts, listener, waiting).gather()


class _Waiting:
    """A wait that is reported: after a while, and then now and again, until it is given up."""

    def __init__(self, hosts: Hosts, say: Say, seconds: float):
        self.hosts, self._say, self._seconds = hosts, say, seconds
        self._began = time.monotonic()
        self._next = FIRST_SECONDS

    def report(self, who: str, why: str) -> None:
        """Say for whom this process waits, if it is time to; PeerLost when it has been too long."""
        waited = time.monotonic() - self._began
        if waited > self._seconds:
            raise PeerLost(
                f"{who} did not come within {duration(self._seconds)}: {why}. Every host needs the "
                f"same command, and must reach {self.hosts.coordinator}"
            )
        if waited >= self._next:
            self._next += NEXT_SECONDS
            self._say(f"waiting for {who}, for {duration(waited)} so far: {why}")


class _Gathering:
    """Process 0, which hears of the others and tells them who is missing."""

    def __init__(self, hosts: Hosts, listener: socket.socket, waiting: _Waiting):
        self.hosts, self.listener, self.waiting = hosts, listener, waiting
        self.new: dict[socket.socket, bytes] = {}  # with what they have sent so far
        self.here: dict[int, tuple[socket.socket, str]] = {}  # by rank, with the host's name

    def gather(self) -> None:
        try:
            while missing := [i for i in range(1, self.hosts.processes) if i not in self.here]:
                self._hear()
                self._tell(missing=missing)
                why = f"this one listens at {self.hosts.coordinator}"
                self.waiting.report(_named(missing, self.hosts), why)
            self._tell(go=True)
        finally:
            for connection in [*self.new, *(one for one, _ in self.here.values())]:
                connection.close()

    def _hear(self) -> None:
        known = {connection: rank for rank, (connection, _) in self.here.items()}
        ready, _, _ = select.select([self.listener, *self.new, *known], [], [], BEAT_SECONDS)
        for one in ready:
            if one is self.listener:
                connection, _ = self.listener.accept()
                connection.settimeout(BEAT_SECONDS)
                self.new[connection] = b""
                continue
            received = _received(one)
            if one in known:  # they say nothing more: it is gone
                self.here.pop(known[one])
                one.close()
                continue
            text = self.new.pop(one) + received
            if received and b"\n" not in text and len(text) < LONGEST_LINE:
                self.new[one] = text
            else:
                self._welcome(one, _read(text) or {})

    def _welcome(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        rank, count, name = hello.get("process"), hello.get("processes"), str(hello.get("host"))
        if not isinstance(rank, int) or not isinstance(count, int):
            connection.close()  # something else that tries this port
            return
        if count != self.hosts.processes:
            self.here[rank] = connection, name
            self._refuse(
                f"process {rank} ({name}) was started as one of {count} processes, and process 0 "
                f"as one of {self.hosts.processes}; start every host with the same number of them"
            )
        if rank in self.here:
            _send(
                connection,
                refused=f"{self.here[rank][1]} is process {rank} already, and so is {name}; every "
                f"host needs a number of its own, 0 to {count - 1}",
            )
            connection.close()
            return
        self.here[rank] = connection, name

    def _refuse(self, text: str) -> None:
        self._tell(refused=text)
        raise UserError(text)

    def _tell(self, **words: Any) -> None:
        for connection, _ in self.here.values():
            _send(connection, **words)


def _attend(hosts: Hosts, waiting: _Waiting) -> None:
    """Any other process, which tells process 0 of itself until all are there."""
    assert hosts.coordinator is not None
    host, _, port = hosts.coordinator.rpartition(":")
    name = socket.gethostname()
    while True:
        why = "what listens there is not waiting for processes of a run"
        try:
            with socket.create_connection((host.strip("[]"), int(port)), SILENT_SECONDS) as one:
                _send(one, process=hosts.process, processes=hosts.processes, host=name)
                for words in _lines(one):
                    if words.get("refused"):
                        raise UserError(words["refused"])
                    if words.get("go"):
                        return
                    missing = [rank for rank in words.get("missing", ()) if rank != hosts.process]
                    if missing:
                        waiting.report(_named(missing, hosts), "process 0 is there")
        except OSError as error:
            why = error.strerror or str(error)
        waiting.report(f"process 0 at {hosts.coordinator}", why)
        time.sleep(BEAT_SECONDS / 2)


def _listener(hosts: Hosts) -> socket.socket:
    """The port of the coordinator, or a refusal where something else listens on it.

    JAX may crash there without a word, or share it with another run and mix the processes of both.
    """
    assert hosts.coordinator is not None
    port = int(hosts.coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]
        raise UserError(
            f"{hosts} cannot listen for the others at {hosts.coordinator} ({why}); another port "
            "would do, on every host"
        ) from None


def _named(ranks: list[int], hosts: Hosts) -> str:
    names = [f"process {rank}" for rank in ranks[:NAMED]]
    more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
    return f"{listing([*names, *more], 'and')} of {hosts.processes}"


def _send(connection: socket.socket, **words: Any) -> None:
    try:
        connection.sendall(json.dumps(words).encode() + b"\n")
    except OSError:  # it has gone, which is noticed where its words are read
        pass


def _lines(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Messages of process 0, until it goes or turns out to be something else."""
    with connection.makefile("rb") as stream:
        while words := _read(stream.readline(LONGEST_LINE)):
            yield words


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        words = parse_json(line)
    except ValueError:
        return None
    return words if isinstance(words, dict) else None


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(LONGEST_LINE)
    except OSError:
        return b""
